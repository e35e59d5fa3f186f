// Bundles the page into the folder that is the argument, with the licenses of what is in it, and `digests.json`: SHA-256
// of the sources and of each file made, by which a test finds a page that does not fit its sources.

import { createHash } from "node:crypto";
import { mkdir, readFile, readdir, rm, writeFile } from "node:fs/promises";
import { basename, join } from "node:path";
import { build } from "esbuild";

const [out] = process.argv.slice(2);
const sha256 = text => createHash("sha256").update(text).digest("hex");

/** KaTeX's fonts in one format, which every browser of today reads. */
const woff2 = {
  name: "woff2",
  setup: bundle =>
    bundle.onLoad({ filter: /katex\.css$/ }, async ({ path }) => ({
      contents: (await readFile(path, "utf8")).replace(
        /,\s*url\([^)]*\.(woff|ttf)\) format\("[a-z]+"\)/g,
        "",
      ),
      loader: "css",
    })),
};

await rm(out, { recursive: true, force: true });
await mkdir(out, { recursive: true });
const common = { bundle: true, minify: true, target: ["chrome125", "firefox128", "safari17.5"], legalComments: "none" };
const { metafile } = await build({
  ...common,
  entryPoints: [
    { in: "main.tsx", out: "page" },
    { in: "style.css", out: "page" },
    { in: "pdfjs-dist/build/pdf.worker.mjs", out: "pdf.worker" },
  ],
  splitting: true,
  format: "esm",
  jsx: "automatic",
  jsxImportSource: "preact",
  assetNames: "[name]",
  chunkNames: "[name]-[hash]",
  loader: { ".woff2": "file" },
  plugins: [woff2],
  logLevel: "warning",
  outdir: out,
  metafile: true,
});
// One classic script: modules are fetched with an Origin header, which is "null" in a frame of an opaque origin.
const { metafile: ofDiagrams } = await build({
  ...common,
  entryPoints: ["diagram/diagram.ts"],
  format: "iife",
  logLevel: "error",
  outdir: out,
  metafile: true,
});
for (const path of ["index.html", "icon.svg", "diagram/diagram.html"])
  await writeFile(join(out, basename(path)), await readFile(path));
const inputs = Object.keys({ ...metafile.inputs, ...ofDiagrams.inputs });
await writeFile(join(out, "LICENSES.txt"), await licenses(inputs));

const sources = (await readdir(".", { recursive: true }))
  .filter(name => /^(?!node_modules).*\.(tsx?|mjs|json|css|html|svg)$/.test(name))
  .sort();
const texts = await Promise.all(sources.map(async name => `${name}\n${await readFile(name, "utf8")}`));
const files = {};
for (const name of (await readdir(out)).sort()) files[name] = sha256(await readFile(join(out, name)));
await writeFile(
  join(out, "digests.json"),
  `${JSON.stringify({ sources: sha256(texts.join("\n")), files }, null, 1)}\n`,
);

/** The license of every package that gave a file. */
async function licenses(inputs) {
  const folders = new Set(inputs.flatMap(path => /^node_modules\/(@[^/]+\/)?[^/]+/.exec(path)?.[0] ?? []));
  const parts = [];
  for (const folder of [...folders].sort()) {
    const { name, version, license } = JSON.parse(await readFile(join(folder, "package.json"), "utf8"));
    const file = (await readdir(folder)).find(each => /^licen[cs]e/i.test(each));
    const text = file ? await readFile(join(folder, file), "utf8") : `License: ${license}`;
    parts.push(`${name} ${version} (${license})\n\n${text.trim()}\n`);
  }
  return parts.join(`\n${"-".repeat(80)}\n\n`);
}
