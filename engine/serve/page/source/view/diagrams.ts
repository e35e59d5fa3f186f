// Diagrams of mermaid. It sets styles as the page's policy forbids it, and is much code: a frame of an origin of its own,
// loaded for the first diagram, draws them under a policy of its own, and the page shows what comes of it as an image,
// in which nothing runs and which fetches nothing.

/** How long one diagram may take: a frame that is silent for so long is taken away. */
const LIMIT_MS = 20_000;

interface Drawn {
  id: number;
  svg?: string;
  width?: number;
  height?: number;
  error?: string;
}

const waiting = new Map<number, (drawn: Drawn) => void>();
let frame: Promise<HTMLIFrameElement> | undefined;
let count = 0;

function load(): Promise<HTMLIFrameElement> {
  const element = document.createElement("iframe");
  element.className = "drawing";
  element.title = "Drawing of diagrams";
  element.tabIndex = -1;
  element.ariaHidden = "true";
  element.sandbox.add("allow-scripts");
  element.src = new URL("diagram.html", import.meta.url).href;
  return new Promise(resolve => {
    addEventListener("message", ({ source, data }: MessageEvent<Drawn | "ready">) => {
      if (source !== element.contentWindow) return;
      if (data === "ready") resolve(element);
      else waiting.get(data.id)?.(data);
    });
    document.body.append(element);
  });
}

async function draw(text: string, dark: boolean): Promise<Drawn> {
  const id = ++count;
  const drawn = new Promise<Drawn>(resolve => {
    const late = (): void => {
      resolve({ id, error: `not drawn in ${LIMIT_MS / 1000} s` });
      document.querySelector("iframe.drawing")?.remove();
      frame = undefined;
    };
    const timer = setTimeout(late, LIMIT_MS);
    waiting.set(id, result => {
      clearTimeout(timer);
      resolve(result);
    });
  });
  const { contentWindow } = await (frame ??= load());
  contentWindow?.postMessage({ id, text, dark }, "*"); // the frame's origin is opaque, and has no name
  return drawn.finally(() => waiting.delete(id));
}

function isDark(): boolean {
  const { colorScheme } = document.documentElement.style;
  return colorScheme.includes("light") ? colorScheme.includes("dark") && system.matches : colorScheme === "dark";
}

const system = matchMedia("(prefers-color-scheme: dark)");
system.addEventListener("change", () => redrawDiagrams());

/** Draw the diagrams of an element that are not there yet; one that cannot be drawn stays as code, with the reason. */
export function drawDiagrams(root: ParentNode): void {
  for (const block of root.querySelectorAll<HTMLElement>("[data-diagram]:not(.set)")) {
    block.classList.add("set");
    void show(block);
  }
}

/** Draw all diagrams anew, in the colours of another theme. */
export function redrawDiagrams(): void {
  for (const block of document.querySelectorAll<HTMLElement>("[data-diagram].set")) void show(block);
}

async function show(block: HTMLElement): Promise<void> {
  const code = block.querySelector("code")?.textContent ?? "";
  const { svg, width = 0, height = 0, error = "" } = await draw(code, isDark());
  if (svg === undefined) {
    const reason = block.querySelector(".undrawn") ?? document.createElement("p");
    reason.className = "hint undrawn";
    reason.textContent = `Not drawn: ${error.split("\n")[0]}`;
    block.append(reason);
    return;
  }
  const image = block.querySelector("img") ?? document.createElement("img");
  image.alt = `Diagram: ${code.trim().replace(/\s+/g, " ").slice(0, 300)}`;
  image.width = Math.ceil(width);
  image.height = Math.ceil(height);
  image.src = `data:image/svg+xml;charset=utf-8,${encodeURIComponent(svg)}`;
  if (!image.isConnected) {
    block.append(image);
    block.classList.add("drawn");
  }
}

/** Show a diagram's code, or the diagram again. */
export function toggleDiagram(button: HTMLElement): void {
  const drawn = button.closest("[data-diagram]")?.classList.toggle("drawn") ?? false;
  button.textContent = drawn ? "Code" : "Diagram";
}
