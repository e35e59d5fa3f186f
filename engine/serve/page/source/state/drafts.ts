// What is written and not sent, by chat: kept in localStorage, which is written before a page can go, also where it is
// closed in the middle of a word. Files that have no room there stay for as long as the page does.

import type { Attachment, Chat } from "./chats";

export interface Draft {
  text: string;
  files: Attachment[];
}

const TEXT = "quengine.draft.";
const FILES = "quengine.draftfiles.";
const drafts = new Map<string, Draft>();

/** The draft of a chat; of "", that of any new one. */
export function draftOf(id: string): Draft {
  let draft = drafts.get(id);
  if (!draft) {
    draft = { text: localStorage.getItem(TEXT + id) ?? "", files: filesOf(id) };
    drafts.set(id, draft);
  }
  return draft;
}

function filesOf(id: string): Attachment[] {
  try {
    return JSON.parse(localStorage.getItem(FILES + id) ?? "[]") as Attachment[];
  } catch {
    return [];
  }
}

export function keepDraft(id: string, draft: Draft): void {
  const before = draftOf(id);
  drafts.set(id, draft);
  write(TEXT + id, draft.text);
  if (draft.files !== before.files) write(FILES + id, draft.files.length ? JSON.stringify(draft.files) : "");
}

function write(key: string, text: string): void {
  localStorage.removeItem(key);
  try {
    if (text) localStorage.setItem(key, text);
  } catch {
    // No room: it stays in this page's memory.
  }
}

/** Drop the drafts of chats that are no more. */
export function dropDrafts(chats: Chat[]): void {
  const there = new Set(["", ...chats.map(chat => chat.id)]);
  for (const key of Object.keys(localStorage))
    for (const prefix of [TEXT, FILES])
      if (key.startsWith(prefix) && !there.has(key.slice(prefix.length))) localStorage.removeItem(key);
}
