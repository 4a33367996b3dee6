package cloudhypervisor

import (
	"bytes"
	"encoding/json"
)

// The program writes what happens as a stream of JSON objects, each followed by an empty line. The log is cut when it grows too long, so it may begin
// in the middle of one.

// event is one of them.
type event struct {
	Source string `json:"source"`
	Event  string `json:"event"`
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
		if json.Unmarshal(text, &e) == nil {
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
