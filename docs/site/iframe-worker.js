/* Browsers refuse to start a worker for a page that was opened from a folder. The search runs in a hidden frame instead. */
if (location.protocol === "file:") {
  window.Worker = class extends EventTarget {
    constructor(url) {
      super()
      const frame = document.createElement("iframe")
      frame.hidden = true
      document.body.append(frame)
      this.inside = frame.contentWindow
      this.inside.postMessage = data => this.dispatchEvent(new MessageEvent("message", { data }))
      const script = this.inside.document.createElement("script")
      script.src = new URL(url, location)
      this.loaded = new Promise(resolve => script.addEventListener("load", resolve))
      this.inside.document.body.append(script)
    }
    async postMessage(data) {
      await this.loaded
      this.inside.dispatchEvent(new this.inside.MessageEvent("message", { data: this.inside.structuredClone(data) }))
    }
  }
}
