// Chats in IndexedDB, a record each. One that grows token by token is written every WAIT_MS, and at once when the page is
// left: with the connection open and the transaction committed by hand, no step of it waits for the page. Other tabs of
// this page are told what was written.

import type { Chat } from "./chats";

const WAIT_MS = 300;
const STORE = "chats";
const tabs = new BroadcastChannel("quengine.chats");
const waiting = new Map<string, { chat: Chat; timer: number }>();
let connection: IDBDatabase | undefined;

function connect(): Promise<IDBDatabase> {
  return new Promise((resolve, reject) => {
    const open = indexedDB.open("quengine", 1);
    open.onupgradeneeded = () => open.result.createObjectStore(STORE, { keyPath: "id" });
    open.onsuccess = () => resolve((connection = open.result));
    open.onerror = () => reject(open.error ?? new Error("IndexedDB cannot be opened"));
  });
}

async function run<T>(mode: IDBTransactionMode, work: (store: IDBObjectStore) => IDBRequest<T>): Promise<T> {
  const transaction = (connection ?? (await connect())).transaction(STORE, mode);
  return new Promise((resolve, reject) => {
    const made = work(transaction.objectStore(STORE));
    transaction.commit();
    transaction.oncomplete = () => resolve(made.result);
    transaction.onerror = transaction.onabort = () =>
      reject(transaction.error ?? new Error("IndexedDB failed"));
  });
}

export const loadChats = (): Promise<Chat[]> => run("readonly", store => store.getAll());

export async function removeChat(id: string): Promise<void> {
  cancel(id);
  await run("readwrite", store => store.delete(id));
  tabs.postMessage({ id });
}

/** Write a chat, now or soon. */
export function saveChat(chat: Chat, soon: boolean): void {
  chat.saved = Date.now();
  if (!soon) void write(chat);
  else if (!waiting.has(chat.id)) {
    waiting.set(chat.id, { chat, timer: window.setTimeout(() => void write(chat), WAIT_MS) });
  }
}

let failed: (error: unknown) => void = () => undefined;

/** What to do when a chat cannot be kept, and when another tab has written or removed one. */
export function watchDatabase(
  onFailure: (error: unknown) => void,
  onChange: (id: string, chat?: Chat) => void,
): void {
  failed = onFailure;
  tabs.onmessage = ({ data: { id, chat } }: MessageEvent<{ id: string; chat?: Chat }>) => onChange(id, chat);
  addEventListener("pagehide", flush);
  document.addEventListener("visibilitychange", () => document.hidden && flush());
}

function flush(): void {
  for (const { chat } of waiting.values()) void write(chat);
}

function cancel(id: string): void {
  window.clearTimeout(waiting.get(id)?.timer);
  waiting.delete(id);
}

async function write(chat: Chat): Promise<void> {
  cancel(chat.id);
  try {
    await run("readwrite", store => store.put(chat));
    tabs.postMessage({ id: chat.id, chat }); // and not only its id: by now its record may be another tab's
  } catch (error) {
    failed(error);
  }
}
