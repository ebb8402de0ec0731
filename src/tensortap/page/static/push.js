// The WebSocket on which the server reports changes: of the run, of the catalog, of jobs.
import { key } from "./api.js";

export class Push {
  constructor(receive, onStateChange) {
    this.receive = receive;
    this.onStateChange = onStateChange;
    this.retryDelay = 500;
    this.showing = null;
    this.open();
  }

  open() {
    const scheme = location.protocol === "https:" ? "wss" : "ws";
    // a browser can add no header to a WebSocket: the key is a subprotocol
    this.socket = new WebSocket(`${scheme}://${location.host}/push`, ["tensortap", key]);
    this.socket.onopen = () => {
      this.retryDelay = 500;
      this.onStateChange(true);
      this.send(this.showing);
    };
    this.socket.onmessage = async (event) => {
      const news = JSON.parse(event.data);
      try {
        await this.receive(news);
      } finally {
        // confirmed only now: a slow browser gets the latest next, not all that was in between
        this.send({ seen: news.n });
      }
    };
    this.socket.onclose = () => {
      this.onStateChange(false);
      setTimeout(() => this.open(), this.retryDelay);
      this.retryDelay = Math.min(10_000, this.retryDelay * 2);
    };
  }

  /** Says which run is shown, and up to where it is known. */
  show(showing) {
    this.showing = showing;
    this.send(showing);
  }

  send(message) {
    const isOpen = this.socket.readyState === WebSocket.OPEN;
    if (message && isOpen) this.socket.send(JSON.stringify(message));
  }
}
