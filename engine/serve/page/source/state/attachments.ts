// Files that a person adds to a message: text as it is, of a PDF its text by pdf.js, which is loaded for the first one.
// Images go to models that see, large ones drawn anew: encoders see no more of them, and chats are kept in the browser.

import type { Attachment } from "./chats";

const MAX_BYTES = 32 << 20;
const IMAGES = /^image\/(?!svg)/;
const READ_BY_SERVER = /^image\/(jpeg|png|webp|gif)$/;
/** Bytes of an image that is sent as it is. */
const MAX_IMAGE_BYTES = 512 << 10;
/** Pixels of the longer side of one that is drawn anew. */
const MAX_SIDE = 2048;
const QUALITY = 0.85;

/** A file's text, or an image if the model `sees`. Throws Error, with the reason, for a file that is neither. */
export async function attach(file: File, sees: boolean): Promise<Attachment> {
  if (IMAGES.test(file.type)) {
    if (!sees) throw new Error(`${file.name}: this model does not read images`);
    return { name: file.name, text: "", image: await imageUrl(file) };
  }
  if (file.size > MAX_BYTES) throw new Error(`${file.name}: larger than ${MAX_BYTES >> 20} MiB`);
  const pdf = file.type === "application/pdf" || /\.pdf$/i.test(file.name);
  const text = pdf ? await pdfText(file) : await plainText(file);
  if (!text.trim()) throw new Error(`${file.name}: there is no text in it`);
  return { name: file.name, text };
}

/** An image as a data: URL. Throws Error for one that the browser does not read. */
async function imageUrl(file: File): Promise<string> {
  let picture: ImageBitmap;
  try {
    picture = await createImageBitmap(file); // upright, as its EXIF says
  } catch {
    throw new Error(`${file.name}: this browser cannot read the image`);
  }
  const { width, height } = picture;
  const scale = Math.min(1, MAX_SIDE / Math.max(width, height));
  if (scale === 1 && file.size <= MAX_IMAGE_BYTES && READ_BY_SERVER.test(file.type)) {
    picture.close();
    return dataUrl(file);
  }
  const canvas = document.createElement("canvas");
  canvas.width = Math.max(1, Math.round(scale * width));
  canvas.height = Math.max(1, Math.round(scale * height));
  const drawing = canvas.getContext("2d");
  if (!drawing) throw new Error(`${file.name}: this browser cannot draw the image`);
  drawing.fillStyle = "#fff"; // behind what is transparent
  drawing.fillRect(0, 0, canvas.width, canvas.height);
  drawing.imageSmoothingQuality = "high";
  drawing.drawImage(picture, 0, 0, canvas.width, canvas.height);
  picture.close();
  return canvas.toDataURL("image/jpeg", QUALITY);
}

function dataUrl(file: File): Promise<string> {
  return new Promise((resolve, reject) => {
    const reader = new FileReader();
    reader.onload = () => resolve(reader.result as string);
    reader.onerror = () => reject(new Error(`${file.name}: cannot be read`));
    reader.readAsDataURL(file);
  });
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

/** What the model is given: images, then files of text, each between lines that name it, then the message. */
export function withAttachments(content: string, attachments: Attachment[] = []): string | object[] {
  const images = attachments.flatMap(({ image }) => image ?? []);
  const files = attachments
    .filter(({ image }) => !image)
    .map(({ name, text }) => `--- file: ${name} ---\n${text.trimEnd()}\n--- end of file ---\n\n`);
  const text = files.join("") + content;
  if (!images.length) return text;
  const parts: object[] = images.map(url => ({ type: "image_url", image_url: { url } }));
  return text ? [...parts, { type: "text", text }] : parts;
}
