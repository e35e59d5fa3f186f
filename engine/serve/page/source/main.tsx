// Where the page starts.

import { render } from "preact";
import { start } from "./state/store";
import { App } from "./view/app";
import { watchServer } from "./view/live";
import { applyTheme } from "./view/sidebar";

applyTheme();
render(<App />, document.body);
void start().then(watchServer);
