// The list of chats: search, rename, export, import, delete; on a narrow screen a drawer over the chat.

import {
  Download,
  Ellipsis,
  KeyRound,
  Moon,
  Pencil,
  Plus,
  Sun,
  SunMoon,
  Trash2,
  Upload,
} from "lucide-preact";
import type { JSX } from "preact";
import { useLayoutEffect, useMemo, useRef, useState } from "preact/hooks";
import { type Chat, exported, imported, search } from "../state/chats";
import { runningIn } from "../state/generation";
import { beginChat, deleteChat, keep, notify, openChat, show, state, useStore } from "../state/store";
import { redrawDiagrams } from "./diagrams";
import { type Entry, Menu, download } from "./widgets";

const DAY_MS = 86_400_000;
const THEMES = ["light dark", "light", "dark"] as const;
const THEME = "quengine.theme";

/** Light, dark, or as the system is. */
export function applyTheme(theme = localStorage.getItem(THEME) ?? THEMES[0]): void {
  document.documentElement.style.colorScheme = theme;
  localStorage.setItem(THEME, theme);
  redrawDiagrams();
}

function themeEntries(): Entry[] {
  const now = localStorage.getItem(THEME);
  const icons = [SunMoon, Sun, Moon];
  return ["System theme", "Light theme", "Dark theme"].map((label, at) => ({
    label,
    icon: icons[at] ?? Sun,
    checked: now === THEMES[at],
    act: () => applyTheme(THEMES[at]),
  }));
}

/** The heading under which a chat stands, by the day of its last change. */
function ageOf(chat: Chat): string {
  const today = new Date().setHours(0, 0, 0, 0);
  if (chat.updated >= today) return "Today";
  if (chat.updated >= today - DAY_MS) return "Yesterday";
  return chat.updated >= today - 7 * DAY_MS ? "Last 7 days" : "Earlier";
}

export function Sidebar(): JSX.Element {
  useStore();
  const [words, setWords] = useState("");
  const file = useRef<HTMLInputElement>(null);
  const found = search(state.chats, words);
  // Drawn anew when it differs, not with every token of an answer.
  const shown = found.flatMap(chat => [chat, chat.title, runningIn(chat)]);
  const list = useMemo(() => <ChatList chats={found} />, [state.chat.id, ...shown]);
  const load = async (files: FileList | null): Promise<void> => {
    try {
      const chats = imported((await files?.[0]?.text()) ?? "");
      for (const chat of chats) keep(chat);
      if (chats[0]) openChat(chats[0]);
      notify(`Imported ${chats.length} ${chats.length === 1 ? "chat" : "chats"}`);
    } catch (error) {
      notify(`Not imported: ${(error as Error).message}`);
    }
    if (file.current) file.current.value = "";
  };
  const entries: Entry[] = [
    ...themeEntries(),
    { label: "Import chats", icon: Upload, act: () => file.current?.click() },
    { label: "Export all chats", icon: Download, act: () => download("chats.json", exported(state.chats)) },
    { label: "API key", icon: KeyRound, act: () => show("key") },
  ];
  return (
    <nav class="sidebar" aria-label="Chats">
      <button type="button" id="new" class="wide" title="Alt+N" onClick={() => beginChat()}>
        <Plus size={17} aria-hidden="true" /> New chat
      </button>
      <input
        type="search"
        placeholder="Search chats"
        aria-label="Search chats"
        value={words}
        onKeyDown={event => event.key === "Escape" && words && event.stopPropagation()} // which empties it
        onInput={event => setWords(event.currentTarget.value)}
      />
      <div class="chats">
        {list}
        {!found.length && (
          <p class="hint">{words ? "No chat holds these words." : "Chats stay in this browser."}</p>
        )}
      </div>
      <input
        ref={file}
        type="file"
        accept=".json,application/json"
        hidden
        aria-label="File of chats"
        onChange={event => void load(event.currentTarget.files)}
      />
      <Menu
        label="More"
        entries={entries}
        class="up"
        button={
          <>
            <Ellipsis size={17} aria-hidden="true" /> <span class="grow">More</span>
          </>
        }
      />
    </nav>
  );
}

function ChatList({ chats }: { chats: Chat[] }): JSX.Element {
  const ages = [...new Set(chats.map(ageOf))];
  return (
    <>
      {ages.map(age => (
        <section key={age} aria-label={age}>
          <h2>{age}</h2>
          <ul>
            {chats
              .filter(chat => ageOf(chat) === age)
              .map(chat => (
                <Row key={chat.id} chat={chat} />
              ))}
          </ul>
        </section>
      ))}
    </>
  );
}

function Row({ chat }: { chat: Chat }): JSX.Element {
  const [naming, setNaming] = useState(false);
  const button = useRef<HTMLButtonElement>(null);
  const named = useRef(false);
  useLayoutEffect(() => {
    if (named.current) button.current?.focus();
    named.current = naming;
  }, [naming]);
  const rename = (title: string): void => {
    setNaming(false);
    if (!title.trim() || title === chat.title) return;
    Object.assign(chat, { title: title.trim(), named: true });
    keep(chat);
  };
  const entries: Entry[] = [
    { label: "Rename", icon: Pencil, act: () => setNaming(true) },
    { label: "Export", icon: Download, act: () => download(`${chat.title}.json`, exported([chat])) },
    { label: "Delete", icon: Trash2, danger: true, act: () => deleteChat(chat) },
  ];
  if (naming)
    return (
      <li>
        <NameField title={chat.title} done={rename} />
      </li>
    );
  return (
    <li class={chat === state.chat ? "open" : ""}>
      <button
        ref={button}
        type="button"
        dir="auto"
        class={`title ${runningIn(chat) ? "busy" : ""}`}
        aria-current={chat === state.chat ? "page" : undefined}
        title={chat.title}
        onClick={() => openChat(chat)}
      >
        {chat.title}
      </button>
      <Menu
        label={`Actions on ${chat.title}`}
        entries={entries}
        button={<Ellipsis size={16} aria-hidden="true" />}
      />
    </li>
  );
}

function NameField({ title, done }: { title: string; done: (title: string) => void }): JSX.Element {
  const field = useRef<HTMLInputElement>(null);
  const ended = useRef(false);
  useLayoutEffect(() => field.current?.select(), []);
  const end = (name: string): void => {
    if (ended.current) return; // a field that is removed is left, too
    ended.current = true;
    done(name);
  };
  const onKey = (event: KeyboardEvent & { currentTarget: HTMLInputElement }): void => {
    if (event.isComposing) return;
    if (event.key === "Enter") end(event.currentTarget.value);
    else if (event.key === "Escape") end("");
    else return;
    event.stopPropagation();
  };
  return (
    <input
      ref={field}
      dir="auto"
      aria-label="Name of the chat"
      defaultValue={title}
      onKeyDown={onKey}
      onBlur={event => end(event.currentTarget.value)}
    />
  );
}
