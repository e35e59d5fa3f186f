// Where the page starts.

import { render } from "preact";
import { describe, start } from "./state/store";
import { App } from "./view/app";
import { watchServer } from "./view/live";
import { applyTheme } from "./view/sidebar";

applyTheme();
void start().then(() => {
  render(<App />, document.body);
  document.getElementById("input")?.focus();
  void describe();
  void watchServer();
});
