"""Names as they are written into what other programs read: a spreadsheet, LaTeX, Markdown."""

from __future__ import annotations

import re

_FORMULA = re.compile(r"'*[=+\-@\t\r]")
"""How a formula begins, or a text that would be read back as what stands behind such an apostrophe."""
_WORDS = {"\\": "backslash", "~": "asciitilde", "^": "asciicircum", "<": "less", ">": "greater", "|": "bar"}
_FORMULAS = {
    "±": r"\pm", "−": "-", "×": r"\times", "·": r"\cdot", "≤": r"\leq", "≥": r"\geq", "≈": r"\approx",
    "∞": r"\infty", "→": r"\rightarrow", "µ": r"\mu", "ς": r"\varsigma", "ο": "o", "²": "^2", "³": "^3",
}  # fmt: skip
_GREEK = "αalpha βbeta γgamma δdelta εepsilon ζzeta ηeta θtheta ιiota κkappa λlambda μmu νnu ξxi πpi ρrho σsigma τtau"
_GREEK += " υupsilon φphi χchi ψpsi ωomega ΓGamma ΔDelta ΘTheta ΛLambda ΞXi ΠPi ΣSigma ΥUpsilon ΦPhi ΨPsi ΩOmega"
_FORMULAS |= {name[0]: f"\\{name[1:]}" for name in _GREEK.split()}
_LATEX = {sign: f"\\text{word}{{}}" for sign, word in _WORDS.items()} | {"–": "--"}
_LATEX |= {sign: f"${formula}$" for sign, formula in _FORMULAS.items()}
_LATEX |= {sign: f"\\{sign}" for sign in "&%$#_{}"}
_MARKDOWN = {"|": r"\|", "<": "&lt;", "\n": " "}


def in_spreadsheet(text: str) -> str:
    """A text as a cell of a CSV file: what a spreadsheet would compute, or run, stands behind an apostrophe.

    >>> in_spreadsheet("=cmd|'/c calc'!A1"), in_spreadsheet("FedAvg"), in_spreadsheet("-1.5e-3")
    ("'=cmd|'/c calc'!A1", 'FedAvg', '-1.5e-3')
    """
    return f"'{text}" if _FORMULA.match(text) and not _is_number(text) else text


def out_of_spreadsheet(cell: str) -> str:
    """The text that `in_spreadsheet` was given.

    >>> [out_of_spreadsheet(in_spreadsheet(text)) for text in ("=1+1", "'=1+1", "-1.5", "'s")]
    ['=1+1', "'=1+1", '-1.5', "'s"]
    """
    return cell[1:] if cell.startswith("'") and _FORMULA.match(cell, 1) else cell


def _is_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True


def in_latex(text: str) -> str:
    r"""A text that LaTeX prints as it is: signs that mean something there, and mathematics and Greek as formulas.

    >>> print(in_latex(r"50 % of \write18{ls} ~ 2^3"))
    50 \% of \textbackslash{}write18\{ls\} \textasciitilde{} 2\textasciicircum{}3
    >>> print(in_latex("μ=0.1 | 1–2 ± <3"))
    $\mu$=0.1 \textbar{} 1--2 $\pm$ \textless{}3
    >>> print(in_latex("[12] FedAvg"))  # which behind the end of a line would be a length
    {}[12] FedAvg
    """
    plain = "".join(_LATEX.get(sign, sign) for sign in " ".join(text.split()))
    return f"{{}}{plain}" if plain.startswith(("[", "*")) else plain


def in_markdown(text: str) -> str:
    r"""A text in a line or a cell of Markdown: it closes no cell and is no HTML.

    >>> print(in_markdown("a | <b>"))
    a \| &lt;b>
    """
    return "".join(_MARKDOWN.get(sign, sign) for sign in text)


def out_of_markdown(text: str) -> str:
    """The text that `in_markdown` was given."""
    return text.replace(r"\|", "|").replace("&lt;", "<")
