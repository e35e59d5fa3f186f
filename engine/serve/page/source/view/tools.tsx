// The calls of a message, folded, with the question whether one may be made; and the dialog in which a chat's tools are
// switched on.

import { Wrench } from "lucide-preact";
import type { JSX } from "preact";
import type { Message, ToolCall } from "../state/chats";
import { keep, keepDefaults, notify, show, useStore } from "../state/store";
import { type Decision, decide, findTools, isAsked, toolsOf } from "../state/tools";
import { Dialog, Switch } from "./widgets";

const MAX_SHOWN = 20_000;

export function Calls({ message }: { message: Message }): JSX.Element | null {
  if (!message.calls?.length) return null;
  return (
    <div class="calls">
      {message.calls.map(call => (
        <Call key={call.id} call={call} running={message.state === "running"} />
      ))}
    </div>
  );
}

function Call({ call, running }: { call: ToolCall; running: boolean }): JSX.Element {
  const asked = isAsked(call);
  const now =
    call.result !== undefined
      ? call.failed
        ? "failed"
        : "done"
      : asked
        ? "waits for you"
        : running
          ? "running"
          : "not made";
  return (
    <details class={`call ${call.failed ? "failed" : ""}`} open={asked}>
      <summary class={now === "running" ? "busy" : ""}>
        <Wrench size={15} aria-hidden="true" /> <strong>{call.name}</strong>
        <span class="brief">{brief(call.arguments)}</span> <small>{now}</small>
      </summary>
      <h3>Arguments</h3>
      <pre tabIndex={0}>{indented(call.arguments)}</pre>
      {call.result !== undefined && (
        <>
          <h3>Result</h3>
          <pre tabIndex={0}>{call.result.slice(0, MAX_SHOWN)}</pre>
        </>
      )}
      {asked && <Question call={call} />}
    </details>
  );
}

function Question({ call }: { call: ToolCall }): JSX.Element {
  const answer = (decision: Decision) => (): void => decide(call, decision);
  return (
    <div class="question" role="group" aria-label={`May ${call.name} run?`}>
      <p>This may change files or run programs on the server's machine. Allow it?</p>
      <button type="button" class="primary" onClick={answer("once")}>
        Allow once
      </button>
      <button type="button" onClick={answer("always")}>
        Always in this chat
      </button>
      <button type="button" onClick={answer("never")}>
        Do not allow
      </button>
    </div>
  );
}

/** Arguments whole, as they are allowed by what is read: characters that are not seen, or turn others around, are spelled. */
function indented(text: string): string {
  let shown = text;
  try {
    shown = JSON.stringify(JSON.parse(text || "{}"), null, 2);
  } catch {
    // as it came
  }
  return shown.replace(/[\p{Cf}\u2028\u2029]/gu, c => `\\u{${c.codePointAt(0)?.toString(16)}}`);
}

const brief = (text: string): string => text.replace(/\s+/g, " ").slice(0, 120);

/** Opens the dialog; says how many tools the chat uses. */
export function ToolsButton(): JSX.Element | null {
  const { chat, tools } = useStore();
  if (!tools.length) return null;
  const count = toolsOf(chat).length;
  const open = (): void => {
    show("tools");
    void findTools();
  };
  return (
    <button
      type="button"
      id="tools"
      class="quiet"
      title="Tools of this chat"
      aria-label={`Tools of this chat: ${count} on`}
      onClick={open}
    >
      <Wrench size={17} aria-hidden="true" /> {count > 0 && <span>{count}</span>}
    </button>
  );
}

export function ToolsDialog(): JSX.Element {
  const { chat, tools } = useStore();
  const use = (names: string[]): void => {
    chat.settings = { ...chat.settings, tools: names };
    keep(chat);
  };
  const used = chat.settings.tools ?? [];
  const groups = [
    { name: "Of this server", tools: tools.filter(each => each.type === "server") },
    { name: "Of MCP servers", tools: tools.filter(each => each.type === "mcp") },
  ];
  const keepAll = (): void => {
    keepDefaults(chat);
    notify("New chats begin with these tools and settings");
  };
  return (
    <Dialog title="Tools of this chat" class="sheet" onClose={() => show("")}>
      <p class="hint">
        The model may call what is switched on. Tools that may change something ask you first.
      </p>
      {groups
        .filter(group => group.tools.length)
        .map(group => (
          <fieldset key={group.name}>
            <legend>{group.name}</legend>
            {group.tools.map(each => (
              <Switch
                key={each.tool}
                id={`tool-${each.tool}`}
                label={each.display_name}
                help={
                  each.definition.function.description.slice(0, 300) +
                  (each.permissions.write ? " Asks first." : "")
                }
                value={used.includes(each.tool)}
                set={on => use(on ? [...used, each.tool] : used.filter(name => name !== each.tool))}
              />
            ))}
          </fieldset>
        ))}
      {(chat.allowed?.length ?? 0) > 0 && (
        <p class="hint">
          Allowed without asking in this chat: {chat.allowed?.join(", ")}.{" "}
          <button
            type="button"
            onClick={() => {
              chat.allowed = [];
              keep(chat);
            }}
          >
            Ask again
          </button>
        </p>
      )}
      <footer>
        <button type="button" onClick={() => use(tools.map(each => each.tool))}>
          All on
        </button>
        <button type="button" onClick={() => use([])}>
          All off
        </button>
        <button type="button" onClick={keepAll}>
          Use for new chats
        </button>
      </footer>
    </Dialog>
  );
}
