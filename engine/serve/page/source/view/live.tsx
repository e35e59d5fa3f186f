// What the server does now, all its users together, read from /metrics once a second while the page is seen: a small plot
// of the speed, and behind it a dialog with speed, batch, queue and cache of the last minute.

import type { JSX } from "preact";
import { useEffect, useState } from "preact/hooks";
import { ApiError, request } from "../state/api";
import { describe, show, state } from "../state/store";
import { Dialog } from "./widgets";

const SAMPLES = 60;
const PERIOD_MS = 1000;

interface Sample {
  speed: number;
  running: number;
  waiting: number;
  cache: number;
}

let samples: Sample[] = [];
let sizes = { slots: 0, cache: 0 };
const CONNECTING = "Connecting";
const NO_KEY = "A key is needed";
let problem = CONNECTING;
let before: { tokens: number; at: number } | undefined;
let redraw: () => void = () => undefined;

/** Read the metrics for as long as the page is open. */
export async function watchServer(): Promise<never> {
  for (;;) {
    if (!document.hidden) await sample();
    await new Promise(resolve => setTimeout(resolve, PERIOD_MS));
  }
}

/** The sum of a metric over its labels, which are the models' names where there are several. */
function total(metrics: string, name: string): number {
  const lines = metrics.matchAll(new RegExp(`^quengine_${name}(?:\\{.*\\})? (\\S+)$`, "gm"));
  return [...lines].reduce((sum, line) => sum + Number(line[1]), 0);
}

async function sample(): Promise<void> {
  if (state.panel === "key") return;
  const was = problem;
  try {
    const text = await (await request("metrics")).text();
    const value = (name: string): number => total(text, name);
    const now = { tokens: value("generated_tokens_total"), at: performance.now() };
    const speed = before ? Math.max(0, (1000 * (now.tokens - before.tokens)) / (now.at - before.at)) : 0;
    before = now;
    sizes = { slots: value("slots"), cache: value("cache_size_tokens") };
    samples = [
      ...samples,
      { speed, running: value("running"), waiting: value("waiting"), cache: value("cache_used_tokens") },
    ].slice(-SAMPLES);
    problem = "";
    if (was || !state.props) await describe();
  } catch (error) {
    before = undefined;
    problem =
      error instanceof ApiError && error.status === 503
        ? "The model is being loaded"
        : (error as Error).message;
    if (error instanceof ApiError && error.status === 401) {
      problem = NO_KEY;
      if (samples.length && was !== NO_KEY) await describe(); // asks for it, once; the page's start does, too
    }
  }
  redraw();
}

function useSamples(): Sample {
  const [, draw] = useState(0);
  useEffect(() => {
    const mine = redraw;
    redraw = () => {
      mine();
      draw(count => count + 1);
    };
    return () => void (redraw = mine);
  }, []);
  return samples.at(-1) ?? { speed: 0, running: 0, waiting: 0, cache: 0 };
}

/** A line of the last minute's values, `top` at its upper edge. */
function Plot({
  values,
  top,
  width,
  height,
}: {
  values: number[];
  top: number;
  width: number;
  height: number;
}): JSX.Element {
  const point = (value: number, index: number): string => {
    const x = width - ((values.length - 1 - index) * width) / (SAMPLES - 1);
    return `${x.toFixed(1)},${(height - 1 - (value / Math.max(top, 1e-9)) * (height - 2)).toFixed(1)}`;
  };
  const line = values.map(point).join(" ");
  const first = line.split(",")[0] ?? String(width);
  return (
    <svg class="plot" viewBox={`0 0 ${width} ${height}`} preserveAspectRatio="none" aria-hidden="true">
      <polygon points={`${first},${height} ${line} ${width},${height}`} />
      <polyline points={line} />
    </svg>
  );
}

export function LiveButton(): JSX.Element {
  const now = useSamples();
  const speeds = samples.map(each => each.speed);
  const text = problem || `${now.speed.toFixed(1)} tok/s`;
  return (
    <button
      type="button"
      id="live"
      class={problem && problem !== CONNECTING ? "lost" : ""}
      title="This server, all users together"
      onClick={() => show(problem === NO_KEY ? "key" : "live")}
    >
      {!problem && speeds.some(speed => speed > 0) && (
        <Plot values={speeds} top={Math.max(1, ...speeds)} width={64} height={20} />
      )}
      <span role="status" aria-live={problem ? "polite" : "off"}>
        {text}
      </span>
    </button>
  );
}

export function LiveDialog(): JSX.Element {
  const now = useSamples();
  const of = (key: keyof Sample): number[] => samples.map(each => each[key]);
  const rows: [label: string, text: string, values: number[], top: number][] = [
    ["Speed", `${now.speed.toFixed(1)} tok/s`, of("speed"), Math.max(1, ...of("speed"))],
    ["Batch", `${now.running} of ${sizes.slots} slots`, of("running"), sizes.slots],
    ["Queue", `${now.waiting} waiting`, of("waiting"), Math.max(4, ...of("waiting"))],
    [
      "KV cache",
      sizes.cache
        ? `${Math.round((100 * now.cache) / sizes.cache)}% of ${sizes.cache.toLocaleString("en")} tokens`
        : "unused so far",
      of("cache"),
      sizes.cache,
    ],
  ];
  return (
    <Dialog title="This server" onClose={() => show("")}>
      <p class="hint">{problem || "The last minute, all users together."}</p>
      <dl class="live">
        {rows.map(([label, text, values, top]) => (
          <div key={label}>
            <dt>{label}</dt>
            <dd>{text}</dd>
            <Plot values={values} top={top} width={360} height={48} />
          </div>
        ))}
      </dl>
    </Dialog>
  );
}
