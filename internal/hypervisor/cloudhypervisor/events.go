package cloudhypervisor

import (
	"bytes"
	"context"
	"encoding/json"
	"path/filepath"

	"cocoonstack.io/cocoon/internal/hypervisor/jail"
)

// The program writes what happens as a stream of JSON objects, each followed by an empty line. The log is cut when it grows too long, so it may begin
// in the middle of one.

// event is one of them.
type event struct {
	Source string `json:"source"`
	Event  string `json:"event"`
	Of     struct {
		ID string `json:"id"` // of a device
	} `json:"properties"`
}

var eventEnd = []byte("\n}\n\n")

// cutEvent takes the first event off data. ok is false if data has no complete one; rest is what may become one then.
func cutEvent(data []byte) (e event, rest []byte, ok bool) {
	for {
		end := bytes.Index(data, eventEnd)
		if end < 0 {
			return event{}, data[max(0, len(data)-maxEvent):], false
		}
		text, rest := data[:end+2], data[end+len(eventEnd):]
		if begin := bytes.LastIndex(text, []byte("\n{\n")); begin >= 0 {
			text = text[begin+1:]
		}
		if e = (event{}); json.Unmarshal(text, &e) == nil {
			return e, rest, true
		}
		data = rest
	}
}

// maxEvent is more than any event has, in bytes.
const maxEvent = 64 << 10

// life is what the events of a guest say about its life.
type life int

const (
	lifeUnknown   life = iota // it has not booted, or what says so is gone
	lifeRunning               // it runs, or is paused
	lifeEnded                 // it has powered itself off; the process stays
	lifeResetting             // it has reset itself, and does not run again yet
)

// after returns the life after e.
func (l life) after(e event) life {
	if l == lifeUnknown && (e.Source == "virtio-device" || e.Event == "device-removed") { // what said before that it boots was cut away
		return lifeRunning
	}
	if e.Source != "vm" {
		return l
	}
	switch e.Event {
	case "booting", "booted", "rebooted", "paused", "resumed":
		return lifeRunning
	case "shutdown":
		return lifeEnded
	case "rebooting":
		return lifeResetting
	}
	return l
}

// lifeOf returns the life after all events in data.
func lifeOf(data []byte) life {
	l := lifeUnknown
	for {
		e, rest, ok := cutEvent(data)
		if !ok {
			return l
		}
		l, data = l.after(e), rest
	}
}

// watcher reads the events of a guest, from its beginning on. Only one goroutine may use it.
type watcher struct {
	log  *jail.Follower
	stop func() bool
	data []byte
}

// watch returns a watcher that ends with ctx.
func (i *instance) watch(ctx context.Context) (*watcher, error) {
	f, err := jail.Follow(filepath.Join(i.h.Dir, eventLog), -1, i.Proc.Done())
	if err != nil {
		return nil, err
	}
	return &watcher{log: f, stop: context.AfterFunc(ctx, func() { _ = f.Close() })}, nil
}

// next waits for the next event.
// Errors: io.EOF after the end of the process, os.ErrClosed after that of ctx.
func (w *watcher) next() (event, error) {
	for buf := make([]byte, 4096); ; {
		e, rest, ok := cutEvent(w.data)
		if w.data = rest; ok {
			return e, nil
		}
		n, err := w.log.Read(buf)
		if err != nil {
			return event{}, err
		}
		w.data = append(w.data, buf[:n]...)
	}
}

func (w *watcher) close() {
	w.stop()
	_ = w.log.Close()
}
