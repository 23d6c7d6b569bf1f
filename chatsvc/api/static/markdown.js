// A small, safe subset of Markdown, as DOM nodes. Every piece of text goes in through textContent; no attribute ever
// holds text of the model, there are no links, no images and no raw HTML. What is not understood is shown as it stands.

const FENCE = /^\s{0,3}(```+|~~~+)\s*([^`]*?)\s*$/;
const HEADING = /^\s{0,3}(#{1,4})\s+(.*?)\s*#*\s*$/;
const BULLET = /^(\s*)([-*+])\s+(.*)$/;
const NUMBER = /^(\s*)(\d{1,9})[.)]\s+(.*)$/;
const QUOTE = /^\s{0,3}>\s?(.*)$/;
const RULE = /^\s{0,3}([-*_])(\s*\1){2,}\s*$/;
const INLINE = /(`+)([^`]|[^`][\s\S]*?[^`])\1(?!`)|\*\*(?=\S)([\s\S]*?\S)\*\*|\*(?=[^\s*])([^*]*?[^\s*])\*(?!\*)/;

/**
 * @param {string} text
 * @param {(code: string) => HTMLElement} [copyButton] makes the button of a code block
 * @returns {DocumentFragment}
 */
export function render(text, copyButton) {
  const out = document.createDocumentFragment();
  blocks(text.split("\n"), out, copyButton, 0);
  return out;
}

function element(name, parent, className) {
  const node = document.createElement(name);
  if (className) node.className = className;
  parent.appendChild(node);
  return node;
}

function blocks(lines, parent, copyButton, depth) {
  let paragraph = [];
  const flush = () => {
    if (paragraph.length) inline(paragraph.join("\n"), element("p", parent));
    paragraph = [];
  };
  for (let i = 0; i < lines.length; ) {
    const line = lines[i];
    let match;
    if ((match = FENCE.exec(line))) {
      flush();
      i = fence(lines, i, match, parent, copyButton);
    } else if (!line.trim()) {
      flush();
      i++;
    } else if (RULE.test(line)) {
      flush();
      element("hr", parent);
      i++;
    } else if ((match = HEADING.exec(line))) {
      flush();
      inline(match[2], element(`h${Math.min(match[1].length + 2, 6)}`, parent));
      i++;
    } else if (QUOTE.test(line) && depth < 4) {
      flush();
      const inner = [];
      for (; i < lines.length && (match = QUOTE.exec(lines[i])); i++) inner.push(match[1]);
      blocks(inner, element("blockquote", parent), copyButton, depth + 1);
    } else if ((BULLET.test(line) || NUMBER.test(line)) && depth < 6) {
      flush();
      i = list(lines, i, parent, copyButton, depth);
    } else {
      paragraph.push(line);
      i++;
    }
  }
  flush();
}

function fence(lines, start, match, parent, copyButton) {
  const [, mark, language] = match;
  const code = [];
  let i = start + 1;
  for (; i < lines.length; i++) {
    const line = lines[i].trim();
    if (line.length >= mark.length && line === mark[0].repeat(line.length)) break;
    code.push(lines[i]);
  }
  const box = element("div", parent, "code");
  const head = element("div", box, "code-head");
  element("span", head).textContent = language || "code";
  const source = code.join("\n");
  if (copyButton) head.appendChild(copyButton(source));
  element("code", element("pre", box)).textContent = source;
  return i + 1;
}

function list(lines, start, parent, copyButton, depth) {
  const item = (line) => BULLET.exec(line) || NUMBER.exec(line);
  const first = item(lines[start]);
  const ordered = !BULLET.test(lines[start]);
  const node = element(ordered ? "ol" : "ul", parent);
  if (ordered) node.start = Number(first[2]);
  const indent = first[1].length;
  let i = start;
  while (i < lines.length) {
    const match = item(lines[i]);
    if (!match || match[1].length !== indent || BULLET.test(lines[i]) === ordered) break;
    const inner = [match[3]];
    i++;
    while (i < lines.length) {
      const line = lines[i];
      const deeper = line.length - line.trimStart().length > indent;
      const blankInside = !line.trim() && /^\s/.test(lines[i + 1] || "");
      if (!(deeper || blankInside) || (item(line) && !deeper)) break;
      inner.push(line.slice(Math.min(line.length - line.trimStart().length, indent + 2)));
      i++;
    }
    const li = element("li", node);
    if (inner.length === 1) inline(inner[0], li);
    else blocks(inner, li, copyButton, depth + 1);
    if (i < lines.length && !lines[i].trim() && item(lines[i + 1] || "")?.[1].length === indent) i++;
  }
  return i;
}

function inline(text, parent) {
  let rest = text;
  for (;;) {
    const match = INLINE.exec(rest);
    if (!match) break;
    if (match.index) parent.appendChild(document.createTextNode(rest.slice(0, match.index)));
    if (match[1]) element("code", parent).textContent = match[2].trim() ? match[2].replace(/^ (.*) $/s, "$1") : match[2];
    else if (match[3] !== undefined) inline(match[3], element("strong", parent));
    else inline(match[4], element("em", parent));
    rest = rest.slice(match.index + match[0].length);
  }
  if (rest) parent.appendChild(document.createTextNode(rest));
}
