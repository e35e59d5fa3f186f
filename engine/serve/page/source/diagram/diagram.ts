// The frame that draws diagrams: mermaid at its strictest, in an origin of its own. It is asked with
// { id, text, dark } and answers { id, svg, width, height }, or { id, error }.

import mermaid from "mermaid";

interface Asked {
  id: number;
  text: string;
  dark: boolean;
}

async function draw({ id, text, dark }: Asked): Promise<unknown> {
  mermaid.initialize({
    startOnLoad: false,
    securityLevel: "strict",
    suppressErrorRendering: true,
    theme: dark ? "dark" : "default",
    htmlLabels: false, // an image has no HTML
    fontFamily: "system-ui, sans-serif",
    secure: ["secure", "securityLevel", "startOnLoad", "maxTextSize", "maxEdges", "suppressErrorRendering", "htmlLabels"],
  });
  const { svg } = await mermaid.render(`d${id}`, text);
  const element = new DOMParser().parseFromString(svg, "text/html").querySelector("svg");
  if (!element) throw new Error("there is no picture");
  const [, , width = 0, height = 0] = (element.getAttribute("viewBox") ?? "").split(/[\s,]+/).map(Number);
  element.setAttribute("width", String(width));
  element.setAttribute("height", String(height));
  return { id, svg: new XMLSerializer().serializeToString(element), width, height };
}

let last: Promise<unknown> = Promise.resolve();
addEventListener("message", ({ source, data }: MessageEvent<Asked>) => {
  if (source !== parent) return;
  last = last
    .then(() => draw(data))
    .catch((error: unknown) => ({ id: data.id, error: error instanceof Error ? error.message : String(error) }))
    .then(answer => parent.postMessage(answer, "*"));
});
parent.postMessage("ready", "*");
