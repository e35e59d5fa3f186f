// The box in which a message is written: files are chosen, dropped or pasted; Enter sends, Shift+Enter breaks the line.

import { ArrowUp, Camera, Paperclip, Square } from "lucide-preact";
import type { JSX } from "preact";
import { useEffect, useLayoutEffect, useRef, useState } from "preact/hooks";
import { attach } from "../state/attachments";
import type { Chat } from "../state/chats";
import { type Draft, draftOf, keepDraft } from "../state/drafts";
import { runningIn, send, stop } from "../state/generation";
import { notify, sees, state } from "../state/store";
import { ContextGauge } from "./gauge";
import { ToolsButton } from "./tools";
import { FileChips, IconButton } from "./widgets";

/** Of a chat without messages, any new one has the draft. */
const keyOf = (chat: Chat): string => (state.chats.includes(chat) ? chat.id : "");

/** Whether a key sends the message; on a touch screen, whose keyboard has no Shift+Enter, Enter breaks the line. */
function sends(event: KeyboardEvent): boolean {
  if (event.key !== "Enter" || event.isComposing || event.keyCode === 229) return false; // 229: of an input method
  return event.ctrlKey || event.metaKey || !(event.shiftKey || matchMedia("(pointer: coarse)").matches);
}

export function Composer({ chat }: { chat: Chat }): JSX.Element {
  const draft = draftOf(keyOf(chat));
  const [, draw] = useState(0);
  const area = useRef<HTMLTextAreaElement>(null);
  const picker = useRef<HTMLInputElement>(null);
  const camera = useRef<HTMLInputElement>(null);
  const running = runningIn(chat) !== undefined;
  const set = (next: Partial<Draft>): void => {
    keepDraft(keyOf(chat), { ...draftOf(keyOf(chat)), ...next });
    draw(count => count + 1);
  };
  useLayoutEffect(() => grow(area.current), [draft.text, chat.id]);

  const add = async (files: Iterable<File>): Promise<void> => {
    const problems: string[] = [];
    for (const file of files) {
      try {
        const attachment = await attach(file, sees(chat));
        set({ files: [...draftOf(keyOf(chat)).files, attachment] });
      } catch (error) {
        problems.push((error as Error).message);
      }
    }
    if (problems.length) notify(problems.join("\n"));
  };
  useEffect(() => watchDrops(files => void add(files)), [chat.id]);

  const choose = ({ currentTarget: chosen }: JSX.TargetedEvent<HTMLInputElement>): void =>
    void add([...(chosen.files ?? [])]).then(() => (chosen.value = "")); // so that the same one can be chosen again

  const submit = (event: Event): void => {
    event.preventDefault();
    if (running) return stop(chat);
    const text = draft.text.trim();
    if (!text && !draft.files.length) return;
    keepDraft(keyOf(chat), { text: "", files: [] });
    send(chat, chat.leaf, text, draft.files);
    draw(count => count + 1);
  };
  const onKey = (event: KeyboardEvent): void => {
    if (!sends(event)) return;
    event.preventDefault();
    if (!running) submit(event);
  };
  const onPaste = (event: ClipboardEvent): void => {
    const files = [...(event.clipboardData?.files ?? [])];
    if (!files.length) return;
    event.preventDefault();
    void add(files);
  };
  return (
    <form class="composer" onSubmit={submit}>
      <FileChips
        files={draft.files}
        label="Files to send"
        remove={at => set({ files: draft.files.filter((_, index) => index !== at) })}
      />
      <textarea
        id="input"
        ref={area}
        rows={1}
        value={draft.text}
        placeholder="Message"
        aria-label="Message"
        dir="auto"
        onInput={event => set({ text: event.currentTarget.value })}
        onKeyDown={onKey}
        onPaste={onPaste}
      />
      <div class="composer-bar">
        <input ref={picker} type="file" multiple hidden aria-label="Files" onChange={choose} />
        <IconButton icon={Paperclip} label="Attach files" onClick={() => picker.current?.click()} />
        {sees(chat) && (
          <>
            <input
              ref={camera}
              type="file"
              accept="image/*"
              capture="environment"
              hidden
              aria-label="Picture"
              onChange={choose}
            />
            <IconButton
              icon={Camera}
              label="Take a picture"
              class="camera"
              onClick={() => camera.current?.click()}
            />
          </>
        )}
        <ToolsButton />
        <span class="grow hint" aria-hidden="true">
          Enter sends, Shift+Enter breaks the line
        </span>
        <ContextGauge chat={chat} />
        <button
          type="submit"
          class="primary send"
          aria-label={running ? "Stop" : "Send"}
          title={running ? "Stop (Esc)" : "Send (Enter)"}
        >
          {running ? (
            <Square size={15} fill="currentColor" aria-hidden="true" />
          ) : (
            <ArrowUp size={19} aria-hidden="true" />
          )}
        </button>
      </div>
    </form>
  );
}

function grow(area: HTMLTextAreaElement | null): void {
  if (!area) return;
  area.style.height = "auto";
  area.style.height = `${area.scrollHeight}px`;
}

/** Files dropped anywhere on the page. */
function watchDrops(add: (files: FileList) => void): () => void {
  const over = (event: DragEvent): void => event.preventDefault();
  const drop = (event: DragEvent): void => {
    event.preventDefault();
    if (event.dataTransfer?.files.length) add(event.dataTransfer.files);
  };
  addEventListener("dragover", over);
  addEventListener("drop", drop);
  return () => {
    removeEventListener("dragover", over);
    removeEventListener("drop", drop);
  };
}
