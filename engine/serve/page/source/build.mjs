// Bundles the page into the folder that is the argument, with the licenses of what is in it, and `digests.json`: SHA-256
// of the sources and of each file made, by which a test finds a page that does not fit its sources.

import { createHash } from "node:crypto";
import { mkdir, readFile, readdir, rm, writeFile } from "node:fs/promises";
import { join } from "node:path";
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
const { metafile } = await build({
  entryPoints: [
    { in: "main.tsx", out: "page" },
    { in: "style.css", out: "page" },
    { in: "pdfjs-dist/build/pdf.worker.mjs", out: "pdf.worker" },
  ],
  bundle: true,
  minify: true,
  splitting: true,
  format: "esm",
  target: ["chrome125", "firefox128", "safari17.5"],
  jsx: "automatic",
  jsxImportSource: "preact",
  assetNames: "[name]",
  chunkNames: "[name]-[hash]",
  loader: { ".woff2": "file" },
  legalComments: "none",
  plugins: [woff2],
  logLevel: "warning",
  outdir: out,
  metafile: true,
});
await writeFile(join(out, "index.html"), await readFile("index.html"));
await writeFile(join(out, "LICENSES.txt"), await licenses(Object.keys(metafile.inputs)));

const sources = (await readdir(".", { recursive: true }))
  .filter(name => /^(?!node_modules).*\.(tsx?|mjs|json|css|html)$/.test(name))
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
