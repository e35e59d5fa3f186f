// The page: header, list of chats, the open chat, the box to write in, and whatever is open over them.

import { ArrowDown, PanelLeft, Settings2 } from "lucide-preact";
import type { JSX } from "preact";
import { useEffect, useLayoutEffect, useRef, useState } from "preact/hooks";
import { keepKey, keyKept } from "../state/api";
import { pathTo } from "../state/chats";
import { regenerate, runningIn, send, stop } from "../state/generation";
import {
  beginChat,
  changed,
  describe,
  isNarrow,
  modelOf,
  show,
  state,
  useStore,
} from "../state/store";
import { Composer } from "./composer";
import { toggleDiagram } from "./diagrams";
import { LiveButton, LiveDialog } from "./live";
import { MessageView } from "./message";
import { About, ModelPicker } from "./models";
import { SettingsDialog } from "./settings";
import { Sidebar } from "./sidebar";
import { ToolsDialog } from "./tools";
import { Dialog, IconButton, Notice, copy } from "./widgets";

const SUGGESTIONS = [
  ["Explain an idea", "Explain how a hash table works, with an example."],
  ["Write code", "Write a Python function that merges overlapping intervals, with tests."],
  ["Compare", "Compare TCP and UDP in a table."],
  ["Solve a problem", "Derive the formula for the sum of the first n squares."],
] as const;

/** Pixels from the end within which it is followed. */
const NEAR_END = 60;

/** The page's address names a chat that is not in this browser. */
function Missing(): JSX.Element {
  return (
    <div class="empty">
      <h1>This chat is not here</h1>
      <p class="hint">
        No chat of this browser has the address that was opened. It may have been deleted, or be in another browser:
        chats are kept in the one in which they were written.
      </p>
      <p>
        <button type="button" class="primary" onClick={() => beginChat(true)}>
          New chat
        </button>
      </p>
    </div>
  );
}

function Empty(): JSX.Element {
  return (
    <div class="empty">
      <h1>What shall we talk about?</h1>
      <p class="hint">
        {modelOf(state.chat)
          ? `${modelOf(state.chat)} answers; chats stay in this browser.`
          : "Not connected to the server; chats stay in this browser."}
      </p>
      <div class="suggestions">
        {SUGGESTIONS.map(([title, text]) => (
          <button key={title} type="button" onClick={() => send(state.chat, null, text, [])}>
            <strong>{title}</strong>
            <span>{text}</span>
          </button>
        ))}
      </div>
    </div>
  );
}

/** Buttons in the messages' HTML: of code, diagrams and footnotes. */
function onButton(event: MouseEvent): void {
  const button = (event.target as Element).closest<HTMLElement>("#log .markdown button");
  if (!button) return;
  if ("copy" in button.dataset) copyCode(button);
  else if ("toggle" in button.dataset) toggleDiagram(button);
  else if ("note" in button.dataset) followNote(button);
}

/** From a reference to its footnote, or back. */
function followNote(button: HTMLElement): void {
  const { note = "", noteref } = button.dataset;
  const wanted = noteref === undefined ? `[data-noteref="${note}"]` : `li[data-note="${note}"]`;
  const target = button.closest(".markdown")?.querySelector<HTMLElement>(wanted);
  target?.scrollIntoView({ block: "nearest" });
  target?.focus({ preventScroll: true });
}

function copyCode(button: HTMLElement): void {
  const code = button.closest(".code")?.querySelector("code")?.textContent ?? "";
  void copy(code).then(() => {
    button.textContent = "Copied";
    setTimeout(() => (button.textContent = "Copy"), 1500);
  });
}

function Log(): JSX.Element {
  const { chat, missing } = useStore();
  const log = useRef<HTMLDivElement>(null);
  const low = useRef(true);
  const [away, setAway] = useState(false);
  const path = pathTo(chat, chat.leaf);
  const running = runningIn(chat);
  const toEnd = (): void => {
    if (low.current && path.length && log.current) log.current.scrollTop = log.current.scrollHeight;
    setAway(path.length > 0 && below() >= NEAR_END);
  };
  const below = (): number => {
    const { scrollHeight = 0, scrollTop = 0, clientHeight = 0 } = log.current ?? {};
    return scrollHeight - scrollTop - clientHeight;
  };
  useLayoutEffect(() => {
    if (!running) low.current = false; // another branch leaves what is above it where it is
  }, [chat.leaf]);
  useLayoutEffect(() => {
    low.current = true;
  }, [chat.id]);
  useLayoutEffect(() => {
    // What the person asks for is shown; an answer that goes on after a tool's result is followed only at the end.
    if (running && chat.messages[running.parent ?? ""]?.role === "user") low.current = true;
  }, [running?.id]);
  useLayoutEffect(toEnd);
  useEffect(() => {
    // What is drawn later (formulas, the box below growing) keeps the end in view too.
    const observer = new ResizeObserver(toEnd);
    for (const element of [log.current, log.current?.firstElementChild])
      if (element) observer.observe(element);
    return () => observer.disconnect();
  }, [path.length > 0]);
  const onScroll = (): void => {
    low.current = below() < NEAR_END;
    setAway(path.length > 0 && !low.current);
  };
  const jump = (): void => {
    low.current = true;
    toEnd();
    log.current?.focus();
  };
  return (
    <div class="conversation">
      <div
        id="log"
        ref={log}
        tabIndex={0}
        role="log"
        aria-label="Conversation"
        aria-live="off"
        onScroll={onScroll}
        onClick={onButton}
      >
        {path.length ? (
          <div class="column">
            <h1 class="hidden">{chat.title}</h1>
            {path.map(message => (
              <MessageView key={message.id} chat={chat} message={message} />
            ))}
          </div>
        ) : missing ? (
          <Missing />
        ) : (
          <Empty />
        )}
      </div>
      {away && <IconButton id="jump" icon={ArrowDown} label="Jump to the end" onClick={jump} />}
    </div>
  );
}

function KeyDialog(): JSX.Element {
  const [key, setKey] = useState(keyKept());
  const submit = (event: Event): void => {
    event.preventDefault();
    keepKey(key.trim());
    show("");
    void describe();
  };
  return (
    <Dialog title="API key" onClose={() => show("")}>
      <form class="key" onSubmit={submit}>
        <label>
          The key that this server was started with
          <input
            type="password"
            autocomplete="off"
            value={key}
            autofocus
            onInput={event => setKey(event.currentTarget.value)}
          />
        </label>
        <p class="hint">It is kept in this browser, and sent to this server alone.</p>
        <button type="submit" class="primary">
          Use this key
        </button>
      </form>
    </Dialog>
  );
}

function shortcuts(event: KeyboardEvent): void {
  const { chat } = state;
  if (event.isComposing) return; // Escape and others belong to the input method
  if (event.key === "Escape") {
    if (state.sidebar && isNarrow()) toggleSidebar();
    else if (!state.panel) stop(chat);
  } else if (event.altKey && event.code === "KeyN") beginChat();
  else if (event.altKey && event.code === "KeyR") {
    const last = pathTo(chat, chat.leaf).at(-1);
    if (last && !runningIn(chat)) regenerate(chat, last);
  } else return;
  if (event.altKey) event.preventDefault();
}

function toggleSidebar(): void {
  state.sidebar = !state.sidebar;
  changed();
  if (state.sidebar) setTimeout(() => document.getElementById("new")?.focus(), 50);
  else document.getElementById("menu")?.focus();
}

/** A window that gets narrow, or is zoomed, has no room for the chats beside the open one. */
function fitSidebar(): void {
  state.sidebar = !isNarrow();
  changed();
}

const PANELS = { settings: SettingsDialog, tools: ToolsDialog, live: LiveDialog, key: KeyDialog, about: About };

export function App(): JSX.Element {
  const { sidebar, panel, spoken } = useStore();
  useLayoutEffect(() => {
    const wide = matchMedia("(min-width: 800px)");
    document.addEventListener("keydown", shortcuts);
    wide.addEventListener("change", fitSidebar);
    return () => {
      document.removeEventListener("keydown", shortcuts);
      wide.removeEventListener("change", fitSidebar);
    };
  }, []);
  const drawer = sidebar && isNarrow();
  const { chat } = state;
  const model = modelOf(chat) || "quengine";
  const title = chat.leaf ? `${chat.title} · ${model}` : model;
  useEffect(() => void (document.title = title), [title]);
  const Panel = panel ? PANELS[panel] : null;
  return (
    <>
      {sidebar && <Sidebar />}
      {drawer && <div class="shade" onClick={toggleSidebar} />}
      <div class="chat" inert={drawer}>
        <header>
          <IconButton
            id="menu"
            icon={PanelLeft}
            label={sidebar ? "Hide the chats" : "Show the chats"}
            onClick={toggleSidebar}
          />
          <ModelPicker />
          <span class="grow" />
          <LiveButton />
          <IconButton icon={Settings2} label="Settings" onClick={() => show("settings")} />
        </header>
        <main>
          <Log />
          <Composer chat={state.chat} />
        </main>
      </div>
      {Panel ? <Panel /> : <Notice />}
      <div class="hidden" role="status">
        {spoken}
      </div>
    </>
  );
}
