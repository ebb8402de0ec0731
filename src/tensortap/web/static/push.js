// What the server tells by itself: that the run has grown, that another came, how far work is.

/** @typedef {{show: string, version: number, step: number}} Showing */

export class Push {
  /** @param {(news: any) => void} hear @param {(open: boolean) => void} state */
  constructor(hear, state) {
    this.hear = hear;
    this.state = state;
    this.wait = 500;
    /** @type {Showing | null} */
    this.showing = null;
    this.open();
  }

  open() {
    const scheme = location.protocol === "https:" ? "wss" : "ws";
    this.socket = new WebSocket(`${scheme}://${location.host}/push`);
    this.socket.onopen = () => {
      this.wait = 500;
      this.state(true);
      this.say();
    };
    this.socket.onmessage = async (event) => {
      const news = JSON.parse(event.data);
      try {
        await this.hear(news);
      } finally {
        // only now: whoever is slow gets the latest next, not all that was between
        if (this.socket?.readyState === WebSocket.OPEN) this.socket.send(JSON.stringify({ seen: news.n }));
      }
    };
    this.socket.onclose = () => {
      this.state(false);
      setTimeout(() => this.open(), this.wait);
      this.wait = Math.min(10_000, this.wait * 2);
    };
  }

  /** Which run is looked at, and up to where it is known. @param {Showing} [showing] */
  say(showing) {
    if (showing) this.showing = showing;
    if (this.showing && this.socket?.readyState === WebSocket.OPEN) this.socket.send(JSON.stringify(this.showing));
  }
}
