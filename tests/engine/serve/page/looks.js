// What tests of the chat page look at, in the page.

/** Texts whose contrast with what is behind them is below WCAG's AA. */
function contrast() {
  const canvas = new OffscreenCanvas(1, 1).getContext("2d", { willReadFrequently: true });
  const rgba = color => {
    canvas.clearRect(0, 0, 1, 1);
    canvas.fillStyle = color;
    canvas.fillRect(0, 0, 1, 1);
    return canvas.getImageData(0, 0, 1, 1).data;
  };
  const luminance = ([r, g, b]) => {
    const part = v => ((v /= 255) <= 0.04045 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4);
    return 0.2126 * part(r) + 0.7152 * part(g) + 0.0722 * part(b);
  };
  const backOf = element => {
    for (let e = element; e; e = e.parentElement) {
      const back = rgba(getComputedStyle(e).backgroundColor);
      if (back[3] === 255) return back;
    }
    return rgba("white");
  };
  const found = [];
  const seen = { opacityProperty: true, visibilityProperty: true };
  const walker = document.createTreeWalker(document.querySelector("dialog[open]") ?? document.body, NodeFilter.SHOW_TEXT);
  while (walker.nextNode()) {
    const text = walker.currentNode.data.trim();
    const element = walker.currentNode.parentElement;
    if (!text || !element.checkVisibility(seen) || element.closest(".hidden, .katex-mathml, :disabled")) continue;
    const both = [luminance(rgba(getComputedStyle(element).color)), luminance(backOf(element))].sort((a, b) => b - a);
    const ratio = (both[0] + 0.05) / (both[1] + 0.05);
    if (ratio < 4.5) found.push(`${ratio.toFixed(2)} ${text.slice(0, 40)}`);
  }
  return found;
}

/** Controls without a name for screen readers. */
function unnamed() {
  const named = e => e.ariaLabel || e.labels?.length || e.textContent.trim() || e.title;
  return [...document.querySelectorAll("button, input, textarea, select, a, summary, [tabindex]")]
    .filter(e => e.checkVisibility() && !e.hidden && !named(e))
    .map(e => e.outerHTML.slice(0, 200));
}

/** Controls that a finger misses: below 44 px one way. A field's label counts, and what stands in a line of text does not. */
function small() {
  const inLine = ".markdown :is(p, li) :is(a, button), .hint button";
  return [...document.querySelectorAll("button, input, textarea, select, summary")]
    .filter(e => e.checkVisibility({ visibilityProperty: true }) && !e.hidden && !e.matches(inLine))
    .filter(e => !document.querySelector("dialog[open]") || e.closest("dialog"))
    .map(e => [e, (e.closest("label") ?? e).getBoundingClientRect()])
    .filter(([, box]) => box.width < 44 || box.height < 44)
    .map(([e, box]) => `${box.width.toFixed()} x ${box.height.toFixed()} ${e.outerHTML.slice(0, 120)}`);
}

/** The focused element's name, and whether its focus is seen; the body has it where the browser's own bar would. */
function focus() {
  const e = document.activeElement;
  if (e === document.body) return { seen: true, name: "body" };
  const box = e.closest(".composer");
  const seen = getComputedStyle(e).outlineStyle !== "none" || (box !== null && getComputedStyle(box).boxShadow !== "none");
  return { seen, name: (e.ariaLabel || e.id || e.textContent || e.tagName).trim().slice(0, 60) };
}
