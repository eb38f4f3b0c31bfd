// Confirmation dialog, the run's token, and notices.

import {
  askCurrent,
  command,
  forgetToken,
  onTokenNeeded,
  Refusal,
  storedToken,
  storeToken,
} from "./api.js";
import { $, put } from "./dom.js";

const UNANSWERED =
  "No controller answered: whether it was done is not known. Try again: it counts once.";
const ASK_AGAIN_MS = 60000; // after Cancel

// Resolves to whether `act(token, optionIsSet)` succeeded. `option`: words beside a checkbox.
// `unanswered`: shown if no controller answers. The command may have been carried out all the
// same; its request id is one for all tries from one dialog.
export function confirmed({ title, text, yes, danger, option, act, unanswered = UNANSWERED }) {
  const dialog = $("dialog");
  const form = $("dialog-form");
  const before = document.activeElement;
  put($("dialog-title"), title);
  put($("dialog-text"), text);
  put($("dialog-error"), "");
  put($("dialog-yes"), yes);
  $("dialog-yes").className = danger ? "danger" : "";
  const needsToken = !storedToken();
  showToken(needsToken);
  $("token").value = "";
  $("option-label").hidden = !option;
  $("option").checked = false;
  put($("option-text"), option || "");
  dialog.showModal();
  (needsToken ? $("token") : $("dialog-no")).focus();
  return new Promise((resolve) => {
    const close = (done) => {
      form.onsubmit = null;
      dialog.onclose = null;
      $("dialog-no").onclick = null;
      if (dialog.open) dialog.close();
      if (before) before.focus();
      resolve(done);
    };
    $("dialog-no").onclick = () => close(false);
    dialog.onclose = () => close(false);
    form.onsubmit = async (e) => {
      e.preventDefault();
      const token = storedToken() || $("token").value.trim();
      if (!token) {
        put($("dialog-error"), "Type the run's token first.");
        return;
      }
      $("dialog-yes").disabled = true;
      try {
        const done = await act(token, $("option").checked);
        storeToken(token);
        close(true);
        if (done?.message) notify(done.message);
      } catch (error) {
        if (error.status === 401) {
          forgetToken();
          showToken(true);
          $("token").focus();
        }
        put($("dialog-error"), error instanceof Refusal ? error.message : unanswered);
      } finally {
        $("dialog-yes").disabled = false;
      }
    };
  });
}

function showToken(shown) {
  $("token-label").hidden = !shown;
  $("token-hint").hidden = !shown;
}

function requestId() {
  const random = [...crypto.getRandomValues(new Uint8Array(12))];
  return `page-${random.map((b) => b.toString(16).padStart(2, "0")).join("")}`;
}

// `ask`: the dialog's words, as `confirmed` takes them; `body(optionIsSet)`: the command's body.
export function confirmCommand(path, ask, body = () => ({})) {
  const request_id = requestId(); // the same for every try from one dialog
  const act = (token, chosen) => command(path, { ...body(chosen), request_id }, token);
  return confirmed({ ...ask, act });
}

let asking = null;
let askAgainAt = 0;
onTokenNeeded(async () => {
  if (!asking && (Date.now() < askAgainAt || $("dialog").open)) return false;
  asking ??= confirmed({
    title: "This controller asks for the run's token",
    text: "It is reachable from other machines, or has another token than this page had.",
    yes: "Go on",
    unanswered: "No controller answers: try again.",
    act: async (token) => {
      await askCurrent("run", token);
    },
  })
    .then((done) => {
      if (!done) askAgainAt = Date.now() + ASK_AGAIN_MS;
      return done;
    })
    .finally(() => {
      asking = null;
    });
  return asking;
});

let quietTimer = 0;
export function notify(text, bad = false) {
  const alert = $("alert");
  alert.hidden = false;
  alert.className = bad ? "alert" : "alert good pill";
  put(alert, text);
  clearTimeout(quietTimer);
  const hide = () => {
    alert.hidden = true;
  };
  quietTimer = setTimeout(hide, bad ? 15000 : 6000);
}
