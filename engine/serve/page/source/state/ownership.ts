// Which tab answers: one alone, by a lock of the browser that ends with the tab, so that another goes on with the stream
// of one that has been closed. Without a secure origin browsers have no locks: a tab then knows its own answers of
// before a reload by its session.

const MINE = "quengine.answering";
let leaving = false;
addEventListener("pagehide", () => (leaving = true));
addEventListener("pageshow", () => (leaving = false));

/** Whether the page is being left, so that the browser ends its requests. */
export const isLeaving = (): boolean => leaving;

function mine(): Set<string> {
  return new Set(JSON.parse(sessionStorage.getItem(MINE) ?? "[]") as string[]);
}

function remember(id: string, on: boolean): void {
  const ids = mine();
  if (on) ids.add(id);
  else ids.delete(id);
  sessionStorage.setItem(MINE, JSON.stringify([...ids]));
}

/** Whether this tab may go on with an answer that it finds under way, once `alone` lets it. */
export const mayTakeOver = (id: string): boolean => "locks" in navigator || mine().has(id);

/** Do the work on an answer when no other tab does any on it. */
export async function alone(id: string, work: () => Promise<void>): Promise<void> {
  const noted = async (): Promise<void> => {
    remember(id, true);
    await work();
    if (!leaving) remember(id, false);
  };
  if ("locks" in navigator) await navigator.locks.request(`quengine.answer.${id}`, noted);
  else await noted();
}
