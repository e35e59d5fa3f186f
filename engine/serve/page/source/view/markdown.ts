// Markdown to HTML that is safe to show, a top-level block at a time, so that a growing answer redraws its last block
// only. The model's own HTML is shown as text; what markdown-it makes passes DOMPurify all the same.

import DOMPurify from "dompurify";
import hljs from "highlight.js/lib/common";
import makeMarkdown, { type Env, type MarkdownIt, type Token } from "markdown-it";
import footnotes from "markdown-it-footnote";
import { drawDiagrams } from "./diagrams";

const MAX_HIGHLIGHTED = 50_000;
/** Characters of code; longer blocks have one colour. */
const MAX_CACHED = 4000;

const ALLOWED_TAGS =
  "a blockquote br button code del div em h1 h2 h3 h4 h5 h6 hr li ol p pre s section span strong sup table tbody td th thead tr ul".split(
    " ",
  );
const ALLOWED_ATTR = [
  "class",
  "href",
  "target",
  "rel",
  "data-copy",
  "data-tex",
  "data-display",
  "data-diagram",
  "data-toggle",
  "data-note",
  "data-noteref",
  "dir",
  "tabindex",
  "type",
  "start",
  "align",
  "role",
  "aria-label",
];

const cache = new Map<string, string>();
const md = makeMarkdown({ html: false, linkify: true, breaks: true });
md.use(footnotes);
md.linkify.set({ fuzzyLink: false, fuzzyEmail: false });

export interface Block {
  key: string;
  html: string;
}

/** The blocks of a text; the key of one changes with its place or kind only, its html with its text. */
export function blocksOf(text: string): Block[] {
  const env: Env = {};
  const lines = text.split("\n");
  const blocks: Block[] = [];
  let group: Token[] = [];
  let depth = 0;
  for (const token of md.parse(text, env)) {
    group.push(token);
    depth += token.nesting;
    if (depth) continue;
    const [from, to] = group[0]?.map ?? [0, 0];
    const context = `${Object.keys(env.references ?? {}).length} ${notesIn(group).join(" ")}`;
    const source = `${context} ${lines.slice(from, to).join("\n")}`;
    const html = to > from ? cached(source, group, env) : rendered(group, env); // footnotes are of no one place
    blocks.push({ key: `${blocks.length} ${group[0]?.type}`, html });
    group = [];
  }
  return blocks;
}

/** The numbers of the footnotes that tokens refer to. */
const notesIn = (tokens: Token[]): string[] =>
  tokens.flatMap(token => token.children ?? []).filter(each => each.type === "footnote_ref").map(noteOf);

function cached(source: string, tokens: Token[], env: Env): string {
  let html = cache.get(source);
  if (html === undefined) {
    html = rendered(tokens, env);
    if (cache.size >= MAX_CACHED) cache.clear();
    cache.set(source, html);
  }
  return html;
}

const rendered = (tokens: Token[], env: Env): string =>
  DOMPurify.sanitize(md.renderer.render(tokens, md.options, env), {
    ALLOWED_TAGS,
    ALLOWED_ATTR,
    ALLOW_DATA_ATTR: false,
    RETURN_TRUSTED_TYPE: true,
  }) as unknown as string;

const escape = (text: string): string => md.utils.escapeHtml(text);

function highlighted(code: string, language: string): string {
  if (!hljs.getLanguage(language) || code.length > MAX_HIGHLIGHTED) return escape(code);
  return hljs.highlight(code, { language, ignoreIllegals: true }).value;
}

/** `diagram`: one is drawn in place of the code, by `typeset`. */
function codeBlock(code: string, info: string, diagram = false): string {
  const language = info.trim().split(/\s+/)[0] ?? "";
  return (
    `<div class="code" dir="ltr"${diagram ? ' data-diagram=""' : ""}>` +
    `<div class="code-bar"><span class="grow">${escape(language || "text")}</span>` +
    (diagram ? '<button type="button" data-toggle="" class="quiet">Code</button>' : "") +
    `<button type="button" data-copy="" class="quiet">Copy</button></div>` +
    `<pre tabindex="0" role="group" aria-label="Code"><code>${highlighted(code, language.toLowerCase())}</code></pre></div>`
  );
}

const attribute = (token: Token | undefined, name: string): string =>
  escape(String(token?.attrGet(name) ?? ""));

const { rules } = md.renderer;
rules.fence = (tokens, index) => {
  const { content = "", info = "", map } = tokens[index] ?? {};
  const lines = (map?.[1] ?? 0) - (map?.[0] ?? 0);
  const closed = lines > content.split("\n").length; // its last line is not code
  return codeBlock(content, info, closed && info.trim() === "mermaid");
};
rules.code_block = (tokens, index) => codeBlock(tokens[index]?.content ?? "", "");
rules.table_open = () => '<div class="table" tabindex="0" role="group" aria-label="Table"><table>';
rules.table_close = () => "</table></div>";
rules.th_open = (tokens, index) => cell("th", tokens[index]);
rules.td_open = (tokens, index) => cell("td", tokens[index]);
rules.link_open = (tokens, index) =>
  `<a href="${attribute(tokens[index], "href")}" target="_blank" rel="noopener noreferrer">`;
// The page fetches nothing from elsewhere: an image is a link to it.
rules.image = (tokens, index) => {
  const source = attribute(tokens[index], "src");
  return `<a href="${source}" target="_blank" rel="noopener noreferrer">${escape(tokens[index]?.content || "image")}</a>`;
};
rules.math = (tokens, index) => {
  const token = tokens[index];
  const tex = escape(token?.content ?? "");
  return `<span class="math" data-tex="${tex}"${token?.markup === "$$" ? ' data-display=""' : ""}>${tex}</span>`;
};

/** The number of a footnote, and which of its references this is. */
const noteOf = (token: Token | undefined): string => {
  const { id = 0, subId = 0 } = (token?.meta ?? {}) as { id?: number; subId?: number };
  return subId ? `${id + 1}:${subId}` : `${id + 1}`;
};
const numberOf = (token: Token | undefined): string => noteOf(token).split(":")[0] ?? "";
// References are buttons, not links: the page's address is that of the chat.
rules.footnote_ref = (tokens, index) => {
  const number = numberOf(tokens[index]);
  return (
    `<sup><button type="button" class="note" data-noteref="${noteOf(tokens[index])}" data-note="${number}" ` +
    `role="doc-noteref" aria-label="Footnote ${number}">${number}</button></sup>`
  );
};
rules.footnote_block_open = () => '<section class="notes" role="doc-endnotes" aria-label="Footnotes"><ol>';
rules.footnote_block_close = () => "</ol></section>";
rules.footnote_open = (tokens, index) => `<li data-note="${numberOf(tokens[index])}" tabindex="-1">`;
rules.footnote_close = () => "</li>";
rules.footnote_anchor = (tokens, index) =>
  ` <button type="button" class="note" data-note="${noteOf(tokens[index])}" role="doc-backlink" ` +
  `aria-label="Back to the text">↩\uFE0E</button>`;

function cell(tag: string, token: Token | undefined): string {
  const align = /text-align:\s*(\w+)/.exec(attribute(token, "style"))?.[1];
  return align ? `<${tag} align="${align}">` : `<${tag}>`;
}

const INLINE: [open: string, close: string, display: boolean][] = [
  ["$$", "$$", true],
  ["\\[", "\\]", true],
  ["\\(", "\\)", false],
  ["$", "$", false],
];

function addMath(parser: MarkdownIt): void {
  parser.inline.ruler.before("escape", "math", (state, silent) => {
    const found = INLINE.find(([open]) => state.src.startsWith(open, state.pos));
    if (!found) return false;
    const [open, close, display] = found;
    const from = state.pos + open.length;
    const to = state.src.indexOf(close, from);
    const tex = state.src.slice(from, to);
    if (to < 0 || to >= state.posMax || !tex.trim()) return false;
    // A dollar sign beside a space or before a digit is money.
    if (open === "$" && (/^\s|\s$|\\$/.test(tex) || /\d/.test(state.src[to + 1] ?? ""))) return false;
    if (!silent) pushMath(state.push("math", "", 0), tex, display);
    state.pos = to + close.length;
    return true;
  });
  parser.block.ruler.before(
    "fence",
    "math",
    (state, first, last, silent) => {
      const lineAt = (line: number): string =>
        state.src.slice((state.bMarks[line] ?? 0) + (state.tShift[line] ?? 0), state.eMarks[line]);
      const opened = INLINE.slice(0, 2).find(([open]) => lineAt(first).startsWith(open));
      if (!opened || (state.sCount[first] ?? 0) - state.blkIndent >= 4) return false;
      const [open, close] = opened;
      let text = lineAt(first).slice(open.length);
      let line = first;
      while (!text.trimEnd().endsWith(close)) {
        if (++line >= last || text.includes(close)) return false;
        text += `\n${lineAt(line)}`;
      }
      if (silent) return true;
      const token = state.push("math", "p", 0);
      pushMath(token, text.trimEnd().slice(0, -close.length), true);
      token.map = [first, line + 1];
      token.block = true;
      state.line = line + 1;
      return true;
    },
    { alt: ["paragraph", "blockquote", "list"] },
  );
}

function pushMath(token: Token, tex: string, display: boolean): void {
  token.content = tex.trim();
  token.markup = display ? "$$" : "$";
}

addMath(md);

/** Items that begin with [ ] or [x] are tasks. */
md.core.ruler.after("inline", "tasks", ({ tokens }) => {
  tokens.forEach((token, index) => {
    const first = token.children?.[0];
    if (token.type !== "inline" || !first || tokens[index - 2]?.type !== "list_item_open") return;
    first.content = first.content.replace(/^\[([ xX])\] /, (_, mark: string) => (mark === " " ? "☐ " : "☑ "));
  });
});

/**
 * Draw the diagrams of an element, and typeset its formulas, of which those that KaTeX does not understand stay as they
 * are. It is loaded for the first one, and sets styles through the DOM, as the page's policy wants it.
 */
export async function typeset(root: HTMLElement): Promise<void> {
  drawDiagrams(root);
  const spans = root.querySelectorAll<HTMLElement>(".math:not(.set)");
  if (!spans.length) return;
  const { default: katex } = await import("katex");
  for (const span of spans) {
    const { tex = "" } = span.dataset;
    span.classList.add("set");
    const displayMode = "display" in span.dataset;
    try {
      katex.render(tex, span, {
        displayMode,
        trust: false,
        strict: false,
        maxExpand: 200,
        maxSize: 20,
        errorColor: "currentcolor",
      });
    } catch {
      span.textContent = tex;
    }
    if (span.scrollWidth > span.clientWidth && displayMode) span.tabIndex = 0; // arrow keys scroll it
  }
}
