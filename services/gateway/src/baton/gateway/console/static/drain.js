// Draining a server: asked twice, with a key of role admin that this tab forgets when it is closed.

import { byId, say } from "./dom.js";

const STORED = "baton-admin-key";

export class Drain {
  /** told(text): what has happened, for everybody to hear. */
  constructor(told) {
    this.told = told;
    this.dialog = byId("drain");
    this.field = byId("admin-key");
    this.go = byId("d-go");
    this.dialog.querySelector("[data-close]").addEventListener("click", () => this.dialog.close());
    byId("drain-form").addEventListener("submit", (event) => {
      event.preventDefault();
      this.order();
    });
  }

  ask(row, about, watchKey) {
    this.row = row;
    this.watchKey = watchKey;
    say(byId("d-title"), `Drain ${row.role} server ${row.instance}?`);
    const running = row.rooms === 1 ? "The 1 room of this gateway there goes on." : `The ${row.rooms} rooms of this gateway there go on.`;
    say(
      byId("d-text"),
      about.keys
        ? `It takes no new rooms, from no gateway, until its process is started anew. ${running}`
        : "This gateway has no keys of operators, so nobody can drain through it: start it with --api-key-file and a key of role admin.",
    );
    say(byId("d-error"), "");
    this.go.hidden = !about.keys;
    this.showField(about.keys && !this.key());
    this.dialog.showModal();
  }

  key() {
    return sessionStorage.getItem(STORED) || "";
  }

  showField(wanted) {
    byId("d-key-field").hidden = !wanted;
    this.field.required = wanted;
    if (wanted) this.field.focus();
  }

  async order() {
    const key = byId("d-key-field").hidden ? this.key() : this.field.value.trim();
    this.go.disabled = true;
    try {
      const answer = await fetch("drain", {
        method: "POST",
        headers: { authorization: `Bearer ${key}`, "content-type": "application/json" },
        body: JSON.stringify({ instance_id: this.row.instance }),
      });
      const body = await answer.json();
      if (!answer.ok) {
        if (answer.status === 401 || answer.status === 403) {
          sessionStorage.removeItem(STORED);
          this.showField(true);
        }
        say(byId("d-error"), body.error.message);
        return;
      }
      sessionStorage.setItem(STORED, key);
      this.field.value = "";
      this.dialog.close();
      this.told(`${this.row.instance} drains; ${body.rooms} rooms go on there`);
    } catch (error) {
      say(byId("d-error"), `the gateway could not be reached: ${error.message}`);
    } finally {
      this.go.disabled = false;
    }
  }
}
