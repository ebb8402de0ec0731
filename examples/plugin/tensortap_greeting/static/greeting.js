import { request } from "/static/api.js";
import { card, fill } from "/static/dom.js";
import { model } from "/static/model.js";

const body = card();
async function show() {
  const { names } = await request("greeting", { run: model.run.id });
  fill(body, `hello, ${names} names`);
}
export const tab = {
  id: "greeting", title: "Greeting", mount: (panel) => panel.append(body), show,
};
