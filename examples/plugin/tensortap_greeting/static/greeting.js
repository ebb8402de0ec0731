// A tab: an id, a title, what to mount once, and what to draw.
import { request } from "/static/api.js";
import { card, fill } from "/static/dom.js";
import { model } from "/static/model.js";

const body = card();

export const tab = {
  id: "greeting",
  title: "Greeting",
  mount: (panel) => panel.append(body),
  async show() {
    const { names } = await request("greeting", { run: model.run.id });
    fill(body, `hello, ${names} names`);
  },
};
