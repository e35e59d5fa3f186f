// How full the model's context is: the tokens of the open conversation of those that the context holds.

import type { JSX } from "preact";
import { type Chat, pathTo } from "../state/chats";
import { runOf, runningIn } from "../state/generation";
import { state, useGrowth } from "../state/store";

/** From this part on the gauge warns. */
const NEARLY_FULL = 0.85;
const RADIUS = 7;
const LENGTH = 2 * Math.PI * RADIUS;

/** Tokens that the newest answer has left in the context, or that the one under way has so far. */
function usedBy(chat: Chat): number {
  const running = runningIn(chat);
  const now = running && runOf(running)?.context;
  if (now) return now;
  const costs = pathTo(chat, chat.leaf).findLast(message => message.costs)?.costs;
  return costs ? (costs.context ?? costs.prompt + costs.tokens) : 0;
}

const short = (count: number): string =>
  count < 1000 ? String(count) : `${(count / 1000).toFixed(count < 99_950 ? 1 : 0)}k`;

export function ContextGauge({ chat }: { chat: Chat }): JSX.Element | null {
  useGrowth(runningIn(chat) !== undefined);
  const size = state.props?.default_generation_settings.n_ctx ?? 0;
  const used = usedBy(chat);
  if (!size || !used) return null;
  const part = Math.min(1, used / size);
  const full = part >= NEARLY_FULL;
  const text = `Context: ${used.toLocaleString("en")} of ${size.toLocaleString("en")} tokens${full ? ", nearly full" : ""}`;
  return (
    <span
      class={`gauge ${full ? "full" : ""}`}
      role="meter"
      aria-label="Context"
      aria-valuemin={0}
      aria-valuemax={size}
      aria-valuenow={used}
      aria-valuetext={text}
      title={text}
    >
      <svg width="18" height="18" viewBox="0 0 18 18" aria-hidden="true">
        <circle cx="9" cy="9" r={RADIUS} />
        <circle cx="9" cy="9" r={RADIUS} stroke-dasharray={`${part * LENGTH} ${LENGTH}`} transform="rotate(-90 9 9)" />
      </svg>
      <span>
        {full && "Nearly full: "}
        {short(used)} / {short(size)}
      </span>
    </span>
  );
}
