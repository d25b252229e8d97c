// The page's script without a browser: elements that remember what they are given, a renderer that keeps what it is to
// draw. node page_without_browser.js CONTENT.json page.js '[["figure", {"x": 1}], …]' writes what hovering there says.
class Element {
  constructor(tag) { Object.assign(this, { tag, children: [], textContent: "", style: {}, dataset: {}, attributes: {}, listeners: {} }); }
  append(...nodes) { this.children.push(...nodes); }
  appendChild(node) { this.children.push(node); return node; }
  replaceChildren(...nodes) { this.children = nodes; }
  remove() {}
  click() {}
  setAttribute(name, value) { this.attributes[name] = value; }
  addEventListener(name, listener) { this.listeners[name] = listener; }
  getBoundingClientRect() { return { width: 0, height: 0 }; }
  querySelectorAll() { return []; }
  get said() { return this.children.length ? this.children.map((each) => each.said) : this.textContent; }
}
const elements = {};
const byName = (name) => (elements[name] ??= new Element(name));
globalThis.document = {
  getElementById: byName, querySelector: byName, querySelectorAll: () => [], createElement: (tag) => new Element(tag),
  createElementNS: (_, tag) => new Element(tag), documentElement: new Element("html"), body: new Element("body"),
};
globalThis.window = { matchMedia: () => ({ matches: false, addEventListener() {} }), addEventListener() {}, innerWidth: 900, innerHeight: 600 };
globalThis.getComputedStyle = () => ({ getPropertyValue: () => "" });
globalThis.drawn = {};
globalThis.vegaEmbed = async (target, spec, options) => {
  drawn[options.downloadFileName] = { spec, options };
  return { finalize() {}, view: { signal() {}, runAsync: async () => {}, data() {} } };
};
const fs = require("node:fs");
byName("content").textContent = fs.readFileSync(process.argv[2], "utf8");
eval(fs.readFileSync(process.argv[3], "utf8"));
const end = () => {
  if (document.documentElement.dataset.drawn !== "yes") { setTimeout(end, 1); return; }
  const tip = document.body.children[0];
  const asked = JSON.parse(process.argv[4]).map(([key, value]) => {
    drawn[key].options.tooltip(null, { clientX: 0, clientY: 0 }, { datum: value }, true);
    return tip.said[0];
  });
  console.log(JSON.stringify({ asked, specs: Object.fromEntries(Object.entries(drawn).map(([key, own]) => [key, own.spec])) }));
};
end();
