// A message: its text, what the model thought before it, its files, costs and errors, and what can be done with it.

import {
  Activity,
  ChevronLeft,
  ChevronRight,
  Copy,
  FileText,
  Pencil,
  Play,
  RotateCcw,
  Trash2,
} from "lucide-preact";
import type { JSX } from "preact";
import { useLayoutEffect, useMemo, useRef, useState } from "preact/hooks";
import { type Attachment, type Chat, type Costs, type Message, pathTo, showBranch, siblings } from "../state/chats";
import { answerNewest, askAnew, regenerate, resume, runOf, runningIn, send, turnsThatFit } from "../state/generation";
import { changed, deleteMessage, keep, notify, state, statusOf, useGrowth } from "../state/store";
import { type Block, blocksOf, typeset } from "./markdown";
import { Tokens } from "./tokens";
import { Calls } from "./tools";
import { FileChips, IconButton, copy, sizeOf } from "./widgets";

const MAX_MARKDOWN = 400_000;
/** Characters; a longer text is shown as it came. */

export function Markdown({ text, live }: { text: string; live: boolean }): JSX.Element {
  // Of a long text that grows, the blocks are made anew the less often the longer that takes.
  const last = useRef<{ text: string; blocks: Block[]; at: number; cost: number }>();
  const blocks = useMemo(() => {
    const before = last.current;
    const now = performance.now();
    if (live && before && now - before.at < 8 * before.cost) return before.blocks;
    const made = blocksOf(text);
    last.current = { text, blocks: made, at: now, cost: performance.now() - now };
    return made;
  }, [text, live]);
  const draw = (): JSX.Element => (
    <div class="markdown">
      {blocks.map(block => (
        <Html key={block.key} html={block.html} />
      ))}
    </div>
  );
  return useMemo(draw, [blocks]); // the same tree is not compared again
}

function Html({ html }: { html: string }): JSX.Element {
  const element = useRef<HTMLDivElement>(null);
  useLayoutEffect(() => void (element.current && typeset(element.current)), [html]);
  return <div ref={element} dir="auto" dangerouslySetInnerHTML={{ __html: html }} />;
}

function Text({ text, live }: { text: string; live: boolean }): JSX.Element {
  if (text.length > MAX_MARKDOWN) return <pre class="plain">{text}</pre>;
  return <Markdown text={text} live={live} />;
}

function Thought({ message }: { message: Message }): JSX.Element | null {
  const [open, setOpen] = useState(false);
  if (!message.thought) return null;
  const running = message.state === "running" && !message.content;
  const seconds = message.thoughtSeconds ?? 0;
  const length = seconds < 1 ? "less than a second" : `${seconds.toFixed(0)} s`;
  return (
    <details class={`thought ${running ? "live" : ""}`} onToggle={event => setOpen(event.currentTarget.open)}>
      <summary class={running ? "busy" : ""}>{running ? "Thinking" : `Thought for ${length}`}</summary>
      <div>{open && <Text text={message.thought} live={running} />}</div>
    </details>
  );
}

const ENDS: Record<string, string> = {
  stop: "a stop token or string",
  length: "the limit of tokens",
  content_filter: "a filter",
  tool_calls: "calls of tools",
};

function CostLine({ costs }: { costs: Costs }): JSX.Element {
  return (
    <details class="costs">
      <summary>
        {costs.tokens} tokens · {costs.perSecond.toFixed(1)} tok/s
      </summary>
      <div>
        Prompt {costs.prompt} tokens ({costs.cached} cached) in {costs.promptSeconds.toFixed(2)} s · ended by{" "}
        {ENDS[costs.end] ?? costs.end}
        {costs.seed !== null && ` · seed ${costs.seed}`}
      </div>
    </details>
  );
}

function Files({ message }: { message: Message }): JSX.Element | null {
  if (!message.attachments?.length) return null;
  return (
    <ul class="files" aria-label="Attached files">
      {message.attachments.map(({ name, text, image }, at) => (
        <li key={at}>
          {image ? (
            <details class="picture">
              <summary>
                <img src={image} alt={name} title={name} />
              </summary>
            </details>
          ) : (
            <details>
              <summary>
                <FileText size={15} aria-hidden="true" /> {name} <small>{sizeOf(text)}</small>
              </summary>
              <pre tabIndex={0}>{text.slice(0, 20_000)}</pre>
            </details>
          )}
        </li>
      ))}
    </ul>
  );
}

/** Which of several branches is shown, with a switch between them. */
function Branches({ chat, message }: { chat: Chat; message: Message }): JSX.Element | null {
  const all = siblings(chat, message);
  if (all.length < 2) return null;
  const at = all.indexOf(message);
  const go = (to: number): void => {
    showBranch(chat, all[to] ?? message);
    keep(chat);
  };
  return (
    <span class="branches" role="group" aria-label="Versions">
      <IconButton
        icon={ChevronLeft}
        label="Previous version"
        disabled={at === 0}
        onClick={() => go(at - 1)}
      />
      <span>
        {at + 1}/{all.length}
      </span>
      <IconButton
        icon={ChevronRight}
        label="Next version"
        disabled={at === all.length - 1}
        onClick={() => go(at + 1)}
      />
    </span>
  );
}

function Editor({ chat, message, close }: { chat: Chat; message: Message; close: () => void }): JSX.Element {
  const area = useRef<HTMLTextAreaElement>(null);
  useLayoutEffect(() => area.current?.focus(), []);
  const user = message.role === "user";
  const wait = user && runningIn(chat) !== undefined;
  const [files, setFiles] = useState<Attachment[]>(message.attachments ?? []);
  const save = (): void => {
    if (wait) return;
    const text = area.current?.value ?? "";
    close();
    if (user) return send(chat, message.parent, text, files);
    message.content = text;
    delete message.tokens;
    keep(chat);
  };
  const onKey = (event: KeyboardEvent): void => {
    if (event.key === "Escape") close();
    else if (event.key === "Enter" && (event.ctrlKey || event.metaKey)) save();
    else return;
    event.stopPropagation();
  };
  return (
    <div class="editor">
      <FileChips
        files={files}
        label="Files of the message"
        remove={at => setFiles(files.filter((_, index) => index !== at))}
      />
      <textarea
        ref={area}
        aria-label="Edit the message"
        dir="auto"
        rows={Math.min(16, message.content.split("\n").length + 2)}
        onKeyDown={onKey}
      >
        {message.content}
      </textarea>
      <div>
        <button type="button" onClick={close}>
          Cancel
        </button>
        <button type="button" class="primary" disabled={wait} onClick={save}>
          {user ? "Send" : "Save"}
        </button>
      </div>
    </div>
  );
}

interface ActionsProps {
  chat: Chat;
  message: Message;
  edit: () => void;
  scored: boolean;
  toggleScored: () => void;
}

function Actions({ chat, message, edit, scored, toggleScored }: ActionsProps): JSX.Element {
  const assistant = message.role === "assistant";
  const last = chat.leaf === message.id;
  const busy = runningIn(chat) !== undefined;
  const nothing = assistant && !message.content; // but thoughts, calls or an error
  const failed = nothing && message.error && !message.thought && !message.calls; // which has its own button
  const copyText = (): void => void copy(message.content).then(() => notify("Copied"));
  return (
    <div class="actions" role="group" aria-label="Actions on this message">
      <Branches chat={chat} message={message} />
      {!nothing && <IconButton icon={Copy} label="Copy" onClick={copyText} />}
      {!nothing && <IconButton icon={Pencil} label="Edit" onClick={edit} />}
      {!failed && (
        <IconButton
          icon={RotateCcw}
          label={assistant ? "Regenerate" : "Answer again"}
          disabled={busy}
          onClick={() => regenerate(chat, message)}
        />
      )}
      {assistant && last && !failed && (
        <IconButton icon={Play} label="Continue" disabled={busy} onClick={() => void resume(chat, message)} />
      )}
      {message.tokens && (
        <IconButton icon={Activity} label="Token probabilities" pressed={scored} onClick={toggleScored} />
      )}
      <IconButton icon={Trash2} label="Delete" onClick={() => deleteMessage(chat, message)} />
      {message.costs && <CostLine costs={message.costs} />}
    </div>
  );
}

/** A prompt that the context does not hold, with what can be done. */
function Overflow({ chat, message }: { chat: Chat; message: Message }): JSX.Element {
  const { tokens = 0, context = 0 } = message.overflow ?? {};
  const busy = runningIn(chat) !== undefined;
  const left = pathTo(chat, message.parent).length - turnsThatFit(chat, message).length;
  const shortens = left < pathTo(chat, message.parent).length;
  const edit = (): void => {
    state.edit = message.parent ?? "";
    changed();
  };
  return (
    <div class="error overflow" role="alert">
      <p>
        The prompt has {tokens.toLocaleString("en")} tokens, and the context holds {context.toLocaleString("en")}.
      </p>
      <div class="choices">
        <button type="button" disabled={busy} onClick={edit}>
          Edit the message
        </button>
        {shortens && (
          <button type="button" disabled={busy} onClick={() => answerNewest(chat, message)}>
            Leave out the oldest {left === 1 ? "message" : `${left} messages`}
          </button>
        )}
        {pathTo(chat, message.parent).length > 1 && (
          <button type="button" onClick={() => askAnew(chat, message)}>
            Ask in a new chat
          </button>
        )}
        <button type="button" disabled={busy} onClick={() => regenerate(chat, message)}>
          Try again
        </button>
      </div>
      <p class="hint">{moreContext(tokens, context)}</p>
    </div>
  );
}

/** How the server would hold so many tokens, and some of an answer. */
function moreContext(tokens: number, context: number): string {
  const most = Number(state.models.find(model => model.meta?.n_ctx === context)?.meta?.n_ctx_train ?? 0);
  const wanted = 1024 * Math.ceil((tokens * 1.25) / 1024);
  if (most && most <= context) return "This is all that the model was trained for.";
  const size = most ? Math.min(wanted, most) : wanted;
  const enough = size > tokens ? "" : ", which is all that the model was trained for, and too little for this prompt";
  return `The server has a larger context when it is started with -c ${size}${enough}.`;
}

function State({ chat, message }: { chat: Chat; message: Message }): JSX.Element | null {
  if (message.overflow) return <Overflow chat={chat} message={message} />;
  if (message.error) {
    return (
      <div class="error" role="alert">
        <span class="grow">{message.error}</span>
        <button type="button" disabled={runningIn(chat) !== undefined} onClick={() => regenerate(chat, message)}>
          Try again
        </button>
      </div>
    );
  }
  if (message.state === "stopped") return <p class="hint">Stopped</p>;
  if (message.state === "interrupted") return <p class="hint">Interrupted; Continue goes on from here</p>;
  return null;
}

function Waiting({ message }: { message: Message }): JSX.Element | null {
  const run = runOf(message);
  if (!run || message.content || message.thought || message.calls) return null;
  if (run.waiting)
    return (
      <p class="hint busy">
        {run.waiting.replace(/^./, first => first.toUpperCase())}. Your message is sent when the server is ready.
      </p>
    );
  const part = run.progress > 0 && run.progress < 1 ? ` ${Math.round(100 * run.progress)}%` : "";
  const loading = (statusOf(message.model ?? "") ?? "loaded") !== "loaded";
  return <p class="hint busy">{loading ? `Loading ${message.model}` : `Processing the prompt${part}`}</p>;
}

export function MessageView({ chat, message }: { chat: Chat; message: Message }): JSX.Element {
  const [editing, setEditing] = useState(false);
  const [scored, setScored] = useState(false);
  const user = message.role === "user";
  const running = runOf(message) !== undefined;
  const elsewhere = !running && message.state === "running"; // in another tab
  useGrowth(running);
  useLayoutEffect(() => {
    if (state.edit !== message.id) return;
    state.edit = "";
    setEditing(true);
  });
  const body =
    scored && message.tokens ? (
      <Tokens tokens={message.tokens} />
    ) : user ? (
      <div class="plain" dir="auto">
        {message.content}
      </div>
    ) : (
      <Text text={message.content} live={message.state === "running"} />
    );
  return (
    <article
      class={`message ${message.role}`}
      aria-label={user ? "You" : (message.model ?? "Model")}
      aria-busy={running || elsewhere}
    >
      <Thought message={message} />
      <Files message={message} />
      {editing ? (
        <Editor chat={chat} message={message} close={() => setEditing(false)} />
      ) : (
        message.content && body
      )}
      <Calls message={message} />
      <Waiting message={message} />
      <State chat={chat} message={message} />
      {!running && !elsewhere && !editing && !(message.calls && chat.leaf !== message.id) && (
        <Actions
          chat={chat}
          message={message}
          edit={() => setEditing(true)}
          scored={scored}
          toggleScored={() => setScored(!scored)}
        />
      )}
    </article>
  );
}
