package qmp

import (
	"bufio"
	"bytes"
	"encoding/json"
	"errors"
	"io"
	"time"

	"cocoonstack.io/cocoon/internal/errdefs"
)

// MaxFrame bounds one message in bytes. QEMU's own answers are far smaller; a larger message means a broken or hostile peer.
const MaxFrame = 4 << 20

// Version is the peer's version from the greeting.
type Version struct {
	Major, Minor, Micro int
	Package             string
}

// Event is a QMP event.
type Event struct {
	Name string
	Data json.RawMessage // an object, or nil
	Time time.Time
}

// Error is QEMU's error answer to a command. Its class is QEMU's, e.g. GenericError or CommandNotFound.
type Error struct {
	Class string `json:"class"`
	Desc  string `json:"desc"`
}

func (e *Error) Error() string { return e.Desc }

// frame is one decoded message; exactly one of greeting, event, answer is set.
type frame struct {
	greeting *Version
	event    *Event
	answer   *answer
}

type answer struct {
	id    uint64
	hasID bool
	value json.RawMessage
	err   *Error
}

type wireFrame struct {
	QMP *struct {
		Version struct {
			QEMU struct {
				Major int `json:"major"`
				Minor int `json:"minor"`
				Micro int `json:"micro"`
			} `json:"qemu"`
			Package string `json:"package"`
		} `json:"version"`
	} `json:"QMP"`
	Event     string          `json:"event"`
	Data      json.RawMessage `json:"data"`
	Timestamp struct {
		Seconds      int64 `json:"seconds"`
		Microseconds int64 `json:"microseconds"`
	} `json:"timestamp"`
	Return json.RawMessage `json:"return"`
	Error  *Error          `json:"error"`
	ID     *uint64         `json:"id"`
}

// parseFrame decodes one line. It returns DataLoss if the line is not a QMP message.
func parseFrame(line []byte) (frame, error) {
	var w wireFrame
	if err := json.Unmarshal(line, &w); err != nil {
		return frame{}, errdefs.DataLossf("QMP message %.80q: %w", line, err)
	}
	switch {
	case w.QMP != nil:
		v := w.QMP.Version
		return frame{greeting: &Version{v.QEMU.Major, v.QEMU.Minor, v.QEMU.Micro, v.Package}}, nil
	case w.Event != "":
		at := time.Unix(w.Timestamp.Seconds, w.Timestamp.Microseconds*int64(time.Microsecond))
		return frame{event: &Event{Name: w.Event, Data: w.Data, Time: at}}, nil
	case w.Error != nil || w.Return != nil:
		a := &answer{value: w.Return, err: w.Error}
		if w.ID != nil {
			a.id, a.hasID = *w.ID, true
		}
		return frame{answer: a}, nil
	}
	return frame{}, errdefs.DataLossf("QMP message %.80q is neither greeting, event nor answer", line)
}

// readFrame returns the next message; io.EOF at a clean end.
func readFrame(r *bufio.Reader) (frame, error) {
	for {
		line, err := readLine(r)
		if err != nil {
			return frame{}, err
		}
		if line = bytes.TrimSpace(line); len(line) > 0 {
			return parseFrame(line)
		}
	}
}

func readLine(r *bufio.Reader) ([]byte, error) {
	var long []byte
	for {
		part, err := r.ReadSlice('\n')
		if err == nil && long == nil {
			return part, nil
		}
		long = append(long, part...)
		switch {
		case len(long) > MaxFrame:
			return nil, errdefs.DataLossf("a QMP message is longer than %d bytes", MaxFrame)
		case err == nil:
			return long, nil
		case errors.Is(err, bufio.ErrBufferFull):
		case errors.Is(err, io.EOF) && len(bytes.TrimSpace(long)) > 0:
			return nil, io.ErrUnexpectedEOF
		default:
			return nil, err
		}
	}
}
