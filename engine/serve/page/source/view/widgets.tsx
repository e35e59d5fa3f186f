// Small parts that several views share: icon buttons, menus, dialogs, notices.

import { type LucideIcon, X } from "lucide-preact";
import type { ComponentChildren, JSX } from "preact";
import { useLayoutEffect, useId, useRef, useState } from "preact/hooks";
import type { Attachment } from "../state/chats";
import { dismiss, useStore } from "../state/store";

export interface IconButtonProps {
  icon: LucideIcon;
  label: string;
  onClick: (event: MouseEvent) => void;
  disabled?: boolean;
  pressed?: boolean;
  id?: string;
  class?: string;
}

export function IconButton({
  icon: Icon,
  label,
  onClick,
  disabled,
  pressed,
  id,
  class: name,
}: IconButtonProps): JSX.Element {
  return (
    <button
      type="button"
      id={id}
      class={`icon ${name ?? ""}`}
      aria-label={label}
      title={label}
      aria-pressed={pressed}
      disabled={disabled}
      onClick={onClick}
    >
      <Icon size={17} aria-hidden="true" />
    </button>
  );
}

export interface Entry {
  label: string;
  icon?: LucideIcon;
  detail?: string;
  checked?: boolean;
  danger?: boolean;
  act: () => void;
}

interface MenuProps {
  label: string;
  entries: Entry[];
  button: ComponentChildren;
  class?: string;
  onOpen?: () => void;
}

/** A button with a menu: arrow keys move, Escape closes it and gives the focus back. */
export function Menu({ label, entries, button, class: name, onOpen }: MenuProps): JSX.Element {
  const [open, setOpen] = useState(false);
  const box = useRef<HTMLDivElement>(null);
  const id = useId();
  const items = (): HTMLElement[] => [
    ...(box.current?.querySelectorAll<HTMLElement>("[role^=menuitem]") ?? []),
  ];
  const close = (): void => {
    setOpen(false);
    box.current?.querySelector("button")?.focus();
  };
  useLayoutEffect(() => {
    if (!open) return;
    box.current?.querySelector(".menu-list")?.scrollIntoView({ block: "nearest" }); // in a list that scrolls
    (items().find(item => item.ariaChecked === "true") ?? items()[0])?.focus();
    const outside = (event: Event): void =>
      void (box.current?.contains(event.target as Node) || setOpen(false));
    document.addEventListener("pointerdown", outside);
    return () => document.removeEventListener("pointerdown", outside);
  }, [open]);
  const onKey = (event: KeyboardEvent): void => {
    if (!open) return;
    const all = items();
    const at = all.indexOf(document.activeElement as HTMLElement);
    const next = { ArrowDown: at + 1, ArrowUp: at - 1, Home: 0, End: -1 }[event.key];
    if (next !== undefined) all.at(next % all.length)?.focus();
    else if (event.key === "Escape") close();
    else if (event.key === "Tab") return setOpen(false);
    else return;
    event.preventDefault();
    event.stopPropagation();
  };
  const toggle = (): void => {
    if (!open) onOpen?.();
    setOpen(!open);
  };
  return (
    <div class={`menu ${name ?? ""}`} ref={box} onKeyDown={onKey}>
      <button
        type="button"
        aria-label={label}
        title={label}
        aria-haspopup="menu"
        aria-expanded={open}
        aria-controls={open ? id : undefined}
        onClick={toggle}
      >
        {button}
      </button>
      {open && (
        <div class="menu-list" role="menu" id={id} aria-label={label}>
          {entries.map(entry => (
            <MenuItem key={entry.label} entry={entry} close={close} />
          ))}
        </div>
      )}
    </div>
  );
}

function MenuItem({ entry, close }: { entry: Entry; close: () => void }): JSX.Element {
  const Icon = entry.icon;
  const act = (): void => {
    close();
    entry.act();
  };
  return (
    <button
      type="button"
      role={entry.checked === undefined ? "menuitem" : "menuitemradio"}
      aria-checked={entry.checked}
      tabIndex={-1}
      class={entry.danger ? "danger" : ""}
      onClick={act}
    >
      {Icon && <Icon size={16} aria-hidden="true" />}
      <span class="grow">{entry.label}</span>
      {entry.detail && <small>{entry.detail}</small>}
    </button>
  );
}

interface DialogProps {
  title: string;
  class?: string;
  onClose: () => void;
  children: ComponentChildren;
}

/** A modal dialog: the browser keeps the focus in it, and Escape or a click beside it closes it. */
export function Dialog({ title, class: name, onClose, children }: DialogProps): JSX.Element {
  const element = useRef<HTMLDialogElement>(null);
  const id = useId();
  useLayoutEffect(() => element.current?.showModal(), []);
  const onPointer = (event: MouseEvent): void => void (event.target === element.current && onClose());
  return (
    <dialog ref={element} class={name} aria-labelledby={id} onClose={onClose} onPointerDown={onPointer}>
      <div class="dialog-body">
        <header>
          <h2 id={id}>{title}</h2>
          <button type="button" class="quiet" onClick={onClose}>
            Close
          </button>
        </header>
        {children}
      </div>
      <Notice />
    </dialog>
  );
}

/** The newest notice. A modal dialog has one of its own, as what is outside of it is covered and inert. */
export function Notice(): JSX.Element {
  const { notice } = useStore();
  const undo = (): void => {
    notice?.undo?.();
    dismiss();
  };
  return (
    <div class="notices" role="status">
      {notice && (
        <div class="notice">
          <span class="grow">{notice.text}</span>
          {notice.undo && (
            <button type="button" class="quiet" onClick={undo}>
              Undo
            </button>
          )}
          <IconButton icon={X} label="Dismiss" onClick={dismiss} />
        </div>
      )}
    </div>
  );
}

export const sizeOf = (text: string): string =>
  text.length < 1000
    ? `${text.length} characters`
    : `${(text.length / 1000).toFixed(text.length < 10_000 ? 1 : 0)}k characters`;

/** Files that go with a message, which can be taken away. */
export function FileChips({
  files,
  label,
  remove,
}: {
  files: Attachment[];
  label: string;
  remove: (at: number) => void;
}): JSX.Element | null {
  if (!files.length) return null;
  return (
    <ul class="chips" aria-label={label}>
      {files.map((file, at) => (
        <li key={at} class={file.image && "picture"}>
          {file.image ? (
            <img src={file.image} alt={file.name} title={file.name} />
          ) : (
            <>
              {file.name} <small>{sizeOf(file.text)}</small>
            </>
          )}
          <IconButton icon={X} label={`Remove ${file.name}`} onClick={() => remove(at)} />
        </li>
      ))}
    </ul>
  );
}

/** Save text as a file of the person's. */
export function download(name: string, text: string): void {
  const link = document.createElement("a");
  link.href = URL.createObjectURL(new Blob([text], { type: "application/json" }));
  link.download = name.replace(/[^\p{L}\p{N} ._-]/gu, "_");
  link.click();
  setTimeout(() => URL.revokeObjectURL(link.href), 10_000);
}

/** Copy text, also where the page has no secure origin and so no clipboard interface, or may not use it. */
export async function copy(text: string): Promise<void> {
  try {
    if (navigator.clipboard) return await navigator.clipboard.writeText(text);
  } catch {
    // The older way is left.
  }
  const area = document.createElement("textarea");
  area.value = text;
  document.body.append(area);
  area.select();
  document.execCommand("copy");
  area.remove();
}

export function Switch({
  id,
  label,
  help,
  value,
  set,
}: {
  id: string;
  label: string;
  help: string;
  value: boolean;
  set: (on: boolean) => void;
}): JSX.Element {
  return (
    <label class="field">
      <span>{label}</span>
      <input
        id={id}
        type="checkbox"
        role="switch"
        checked={value}
        aria-describedby={`${id}-help`}
        onChange={event => set(event.currentTarget.checked)}
      />
      <small id={`${id}-help`}>{help}</small>
    </label>
  );
}
