// Files that a person adds to a message: text as it is, of a PDF its text by pdf.js, which is loaded for the first one.

import type { Attachment } from "./chats";

const MAX_BYTES = 32 << 20;
const IMAGES = /^image\/(?!svg)/;

/** A file's text. Throws Error, with the reason, for a file that has none. */
export async function attach(file: File): Promise<Attachment> {
  if (IMAGES.test(file.type)) throw new Error(`${file.name}: this model does not read images`);
  if (file.size > MAX_BYTES) throw new Error(`${file.name}: larger than ${MAX_BYTES >> 20} MiB`);
  const pdf = file.type === "application/pdf" || /\.pdf$/i.test(file.name);
  const text = pdf ? await pdfText(file) : await plainText(file);
  if (!text.trim()) throw new Error(`${file.name}: there is no text in it`);
  return { name: file.name, text };
}

async function plainText(file: File): Promise<string> {
  try {
    const text = new TextDecoder("utf-8", { fatal: true }).decode(await file.arrayBuffer());
    if (!text.includes("\0")) return text;
  } catch {
    // Not UTF-8: said below.
  }
  throw new Error(`${file.name}: not a text file or a PDF`);
}

/** The address of pdf.js's worker, which Trusted Types let nobody else choose. */
function workerAddress(): URL {
  const url = new URL("pdf.worker.js", import.meta.url).href;
  const policy = window.trustedTypes?.createPolicy("quengine-worker", {
    createScriptURL: (address: string) => address,
  });
  return (policy?.createScriptURL(url) ?? url) as unknown as URL;
}

async function pdfText(file: File): Promise<string> {
  const { getDocument, GlobalWorkerOptions } = await import("pdfjs-dist");
  GlobalWorkerOptions.workerPort ??= new Worker(workerAddress(), { type: "module" });
  const task = getDocument({
    data: await file.arrayBuffer(),
    disableFontFace: true,
    isEvalSupported: false,
    useWasm: false,
    verbosity: 0,
  });
  try {
    const pdf = await task.promise;
    const pages: string[] = [];
    for (let number = 1; number <= pdf.numPages; number++) {
      const { items } = await (await pdf.getPage(number)).getTextContent();
      pages.push(items.map(item => ("str" in item ? item.str + (item.hasEOL ? "\n" : "") : "")).join(""));
    }
    return pages.join("\n\n");
  } catch (error) {
    throw new Error(`${file.name}: the PDF cannot be read (${(error as Error).message})`);
  } finally {
    void task.destroy();
  }
}

/** What the model is given: the files, each between lines that name it, then the message. */
export function withAttachments(content: string, attachments: Attachment[] = []): string {
  const files = attachments.map(
    ({ name, text }) => `--- file: ${name} ---\n${text.trimEnd()}\n--- end of file ---\n\n`,
  );
  return files.join("") + content;
}
