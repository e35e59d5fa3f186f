// Chats as trees of messages: an edit or a second answer is a sibling, and the path from the root to `leaf` is shown.

import type { Settings } from "./options";

/** A file's text, or an image as a data: URL, whose text is empty. */
export interface Attachment {
  name: string;
  text: string;
  image?: string;
}

/** A token of an answer, with the likeliest ones in its place. */
export interface Token {
  text: string;
  logprob: number;
  top: { text: string; logprob: number }[];
}

/** A call of a tool, with its result as the model is told it. */
export interface ToolCall {
  id: string;
  name: string;
  arguments: string;
  result?: string;
  failed?: boolean;
}

/** What an answer took, as the server's last event says. */
export interface Costs {
  tokens: number;
  perSecond: number;
  prompt: number;
  cached: number;
  promptSeconds: number;
  end: string;
  seed: number | null;
  /** Tokens of the prompt and the answer, which the context held at its end. */
  context?: number;
}

export interface Message {
  id: string;
  parent: string | null;
  role: "user" | "assistant";
  time: number;
  content: string;
  thought?: string;
  thoughtSeconds?: number;
  attachments?: Attachment[];
  tokens?: Token[];
  calls?: ToolCall[];
  costs?: Costs;
  model?: string;
  error?: string;
  /** Why it was refused: the prompt's tokens, and those that the context holds. */
  overflow?: { tokens: number; context: number };
  state?: "running" | "stopped" | "interrupted";
  /** The server's stream of an answer under way: its id, the bytes that were read, and its end, where that has come. */
  stream?: { id: string; at: number; end: string };
}

export interface Chat {
  id: string;
  title: string;
  named: boolean;
  updated: number;
  /** When it was last written, by which another tab finds what it has not seen. */
  saved: number;
  leaf: string | null;
  messages: Record<string, Message>;
  settings: Settings;
  model?: string;
  /** Tools that may change something and need not be asked for any more. */
  allowed?: string[];
}

export function newChat(settings: Settings, model?: string): Chat {
  const chat: Chat = {
    id: crypto.randomUUID?.() ?? randomId(),
    title: "New chat",
    named: false,
    updated: Date.now(),
    saved: 0,
    leaf: null,
    messages: {},
    settings,
  };
  return model ? { ...chat, model } : chat;
}

/** randomUUID is there in secure contexts only, and a server of the local network is none. */
export const randomId = (): string =>
  Array.from(crypto.getRandomValues(new Uint8Array(12)), byte => byte.toString(16).padStart(2, "0")).join("");

export function addMessage(
  chat: Chat,
  parent: string | null,
  fields: Pick<Message, "role" | "content"> & Partial<Message>,
): Message {
  const message: Message = { ...fields, id: randomId(), parent, time: Date.now() };
  chat.messages[message.id] = message;
  chat.leaf = message.id;
  chat.updated = message.time;
  return message;
}

/** The messages from the first to `leaf`. */
export function pathTo(chat: Chat, leaf: string | null): Message[] {
  const path: Message[] = [];
  const seen = new Set<string>();
  for (let id = leaf; id !== null && !seen.has(id);) {
    const message: Message | undefined = chat.messages[id];
    if (!message) break;
    seen.add(id);
    path.unshift(message);
    id = message.parent;
  }
  return path;
}

/** The part of the context that a shortened conversation may fill, so that there is room for an answer. */
const FILLED = 0.75;

/** Characters of a text that takes as much of the context as an image does, about. */
const IMAGE_SIZE = 4000;

const sizeOf = ({ content, attachments = [], calls = [] }: Message): number =>
  [content, ...attachments.map(file => file.text), ...calls.map(call => call.arguments + (call.result ?? ""))].join("")
    .length +
  IMAGE_SIZE * attachments.filter(file => file.image).length;

/**
 * Of messages that are too long for the context, the newest turns that fit it, by their length in characters; none if all
 * are the same turn, or the last one alone is too long. `extra`: characters that come with each prompt.
 */
export function newestTurns(path: Message[], overflow: { tokens: number; context: number }, extra: number): Message[] {
  const sizes = path.map(sizeOf);
  const total = sizes.reduce((sum, size) => sum + size, extra);
  const most = (total * FILLED * overflow.context) / overflow.tokens;
  let kept = path.length;
  for (let size = extra, at = path.length - 1; at > 0; at--) {
    size += sizes[at] ?? 0;
    if (size > most) break;
    if (path[at]?.role === "user") kept = at;
  }
  return path.slice(kept);
}

/** Add messages again as a branch of their own, from the chat's beginning. */
export function addBranch(chat: Chat, messages: Message[]): string | null {
  let parent: string | null = null;
  for (const message of messages) parent = addMessage(chat, parent, message).id;
  return parent;
}

/** The messages that stand in the same place, oldest first. */
export function siblings(chat: Chat, message: Message): Message[] {
  return childrenOf(chat, message.parent).filter(other => other.role === message.role);
}

function childrenOf(chat: Chat, parent: string | null): Message[] {
  return Object.values(chat.messages)
    .filter(message => message.parent === parent)
    .sort((a, b) => a.time - b.time);
}

/** Show the branch of `message`, down to its newest end. */
export function showBranch(chat: Chat, message: Message): void {
  let leaf = message;
  for (;;) {
    const next = childrenOf(chat, leaf.id).at(-1);
    if (!next) break;
    leaf = next;
  }
  chat.leaf = leaf.id;
}

/** Remove a message and all that follows it in every branch; what was shown becomes its neighbour or its parent. */
export function removeMessage(chat: Chat, message: Message): void {
  const neighbour = siblings(chat, message)
    .filter(other => other !== message)
    .at(-1);
  const shown = pathTo(chat, chat.leaf).includes(message);
  const remove = (id: string): void => {
    for (const child of childrenOf(chat, id)) remove(child.id);
    delete chat.messages[id];
  };
  remove(message.id);
  if (!shown) return;
  if (neighbour) showBranch(chat, neighbour);
  else chat.leaf = message.parent;
}

/** Chats whose title or messages hold the words, newest first. */
export function search(chats: Chat[], words: string): Chat[] {
  const wanted = words.toLowerCase().split(/\s+/).filter(Boolean);
  const holds = (chat: Chat): boolean => {
    const texts = [chat.title, ...Object.values(chat.messages).map(message => message.content)]
      .join("\n")
      .toLowerCase();
    return wanted.every(word => texts.includes(word));
  };
  return wanted.length ? chats.filter(holds) : chats;
}

export const exported = (chats: Chat[]): string =>
  JSON.stringify({ format: "quengine-chats", version: 1, chats }, null, 1);

/** The chats of an exported file, each under a new id. Throws Error for another file. */
export function imported(text: string): Chat[] {
  let file: unknown;
  try {
    file = JSON.parse(text);
  } catch {
    throw new Error("the file is not JSON");
  }
  const { format, chats } = (file ?? {}) as { format?: unknown; chats?: unknown };
  if (format !== "quengine-chats" || !Array.isArray(chats))
    throw new Error("the file holds no chats of this page");
  return chats.map(checked);
}

/** The form of a value: a type's name, a list of a form, or an object's fields, with ? after those that may be absent. */
type Form = string | [Form] | { [key: string]: Form };

const FILE: Form = { name: "string", text: "string", "image?": "string" };
/** What an image of a chat is, in a file too that another has exported. */
const IMAGE = /^data:image\/(jpeg|png|webp|gif);base64,[A-Za-z0-9+/=]*$/;
const SCORED: Form = { text: "string", logprob: "number" };
const MESSAGE: Form = {
  id: "string",
  role: "string",
  content: "string",
  "thought?": "string",
  "thoughtSeconds?": "number",
  "attachments?": [FILE],
  "tokens?": [{ text: "string", logprob: "number", top: [SCORED] }],
  "calls?": [{ id: "string", name: "string", arguments: "string", "result?": "string" }],
  "costs?": { tokens: "number", perSecond: "number", prompt: "number", cached: "number", promptSeconds: "number", end: "string", "context?": "number" },
  "model?": "string",
  "error?": "string",
  "overflow?": { tokens: "number", context: "number" },
  "state?": "string",
};
const TEXTS_OF_SETTINGS: Form = {
  "system?": "string",
  "stop?": "string",
  "schema?": "string",
  "effort?": "string",
  "tools?": ["string"],
};

function fits(value: unknown, form: Form): boolean {
  if (typeof form === "string") return typeof value === form;
  if (Array.isArray(form)) return Array.isArray(value) && value.every(each => fits(each, form[0]));
  if (typeof value !== "object" || value === null) return false;
  return Object.entries(form).every(([key, inner]) => {
    const field = (value as Record<string, unknown>)[key.replace("?", "")];
    return (key.endsWith("?") && field === undefined) || fits(field, inner);
  });
}

function checked(value: unknown): Chat {
  const chat = (value ?? {}) as Partial<Chat>;
  const messages: Record<string, Message> = {};
  for (const message of Object.values(chat.messages ?? {})) {
    if (!fits(message, MESSAGE) || !["user", "assistant"].includes(message.role))
      throw new Error("a message of the file is damaged");
    if (message.attachments?.some(({ image }) => image !== undefined && !IMAGE.test(image)))
      throw new Error("an image of the file is damaged");
    if (message.state === "running") message.state = "interrupted";
    delete message.stream;
    messages[message.id] = { ...message, parent: message.parent ?? null, time: Number(message.time) || 0 };
  }
  const leaf = typeof chat.leaf === "string" && chat.leaf in messages ? chat.leaf : Object.keys(messages).at(-1);
  const { settings, model, updated } = chat;
  const made: Chat = {
    ...newChat(fits(settings, TEXTS_OF_SETTINGS) ? (settings as Settings) : {}, fits(model, "string") ? model : undefined),
    title: String(chat.title ?? "Imported chat"),
    named: true,
    messages,
    leaf: leaf ?? null,
  };
  if (Object.keys(messages).some(id => (pathTo(made, id)[0]?.parent ?? "") in messages))
    throw new Error("messages of the file follow each other in a circle");
  return updated && fits(updated, "number") ? { ...made, updated } : made;
}
