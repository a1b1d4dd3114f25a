/* Browsers start no worker from disk: there the search's script runs in a hidden frame instead. */
if (location.protocol === "file:") {
  window.Worker = class extends EventTarget {
    constructor(url) {
      super();
      const frame = document.createElement("iframe");
      frame.hidden = true;
      addEventListener("message", (event) => {
        if (event.source === frame.contentWindow)
          this.dispatchEvent(new MessageEvent("message", { data: event.data }));
      });
      this.ready = new Promise((resolve) => { frame.onload = () => resolve(frame.contentWindow); });
      frame.srcdoc =
        `<script>postMessage = (data) => parent.postMessage(data, "*");<\/script>` +
        `<script src="${new URL(url, location)}"><\/script>`;
      document.body.append(frame);
    }
    postMessage(data) {
      this.ready.then((frame) => frame.dispatchEvent(new MessageEvent("message", { data })));
    }
  };
}
