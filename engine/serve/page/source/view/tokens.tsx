// The tokens of an answer, coloured by their probability; the pointer or the arrow keys show what else was likely.

import type { JSX } from "preact";
import { useState } from "preact/hooks";
import type { Token } from "../state/chats";

const MAX_SHOWN = 5000;

const share = (logprob: number): string => `${(100 * Math.exp(logprob)).toFixed(1)}%`;
const shown = (text: string): string => JSON.stringify(text).slice(1, -1).replaceAll('\\"', '"') || "∅";

/** 0 for a certain token to 4 for one below 10%. */
const level = (logprob: number): number =>
  [0.9, 0.6, 0.3, 0.1].filter(bound => Math.exp(logprob) < bound).length;

export function Tokens({ tokens }: { tokens: Token[] }): JSX.Element {
  const [at, setAt] = useState(0);
  const all = tokens.slice(0, MAX_SHOWN);
  const token = all[at];
  const onKey = (event: KeyboardEvent): void => {
    const step = { ArrowRight: 1, ArrowLeft: -1 }[event.key];
    if (step === undefined) return;
    event.preventDefault();
    setAt(Math.min(all.length - 1, Math.max(0, at + step)));
  };
  const onPointer = (event: Event): void => {
    const index = (event.target as HTMLElement).dataset.index;
    if (index !== undefined) setAt(Number(index));
  };
  return (
    <div class="tokens">
      <div
        class="plain"
        tabIndex={0}
        role="application"
        aria-label="Tokens; the arrow keys move"
        onKeyDown={onKey}
        onMouseOver={onPointer}
        onClick={onPointer}
      >
        {all.map((each, index) => (
          <span
            key={index}
            data-index={index}
            class={`token p${level(each.logprob)} ${index === at ? "at" : ""}`}
          >
            {each.text}
          </span>
        ))}
        {tokens.length > MAX_SHOWN && ` … ${tokens.length - MAX_SHOWN} more`}
      </div>
      {token && <Alternatives token={token} />}
    </div>
  );
}

function Alternatives({ token }: { token: Token }): JSX.Element {
  const inTop = token.top.some(other => other.text === token.text);
  const rows = inTop ? token.top : [...token.top, token];
  return (
    <table class="alternatives" aria-live="polite">
      <caption class="hidden">The likeliest tokens in this place</caption>
      <tbody>
        {rows.map(({ text, logprob }) => (
          <tr key={text} class={text === token.text ? "chosen" : ""}>
            <th scope="row">{shown(text)}</th>
            <td>
              <meter min={0} max={1} value={Math.exp(logprob)} aria-hidden="true" />
            </td>
            <td>{share(logprob)}</td>
          </tr>
        ))}
      </tbody>
    </table>
  );
}
