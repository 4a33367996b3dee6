// Package logfile is the log of one container: a folder with two files of bounded size, one process that writes them, and any number of
// readers.
//
// The writer is a process of its own per container (Serve). The shim of the container starts it with the ends of the pipes that are the
// container's stdout and stderr. So the log needs neither cocoond nor containerd: both may be killed and restarted, no line is lost, the
// container never waits for them, and the bound holds meanwhile. The alternatives lack one of these. A file that the shim writes itself
// has no times and no bound: to cut it, somebody must run, and lines that are written between the copy and the cut are lost. Named pipes
// stop the container when nobody reads. A writer of all containers would be one more daemon, whose absence stops all.
//
// A line in a file is RFC3339Nano stdout|stderr F|P TEXT, as a kubelet reads it, where P marks a part of a line. What the node has
// written when it loses power is what the kernel had written back, usually all but the last seconds. The package knows no container.
package logfile

import (
	"bytes"
	"time"

	"cocoonstack.io/cocoon/internal/container"
)

const (
	current = "log"   // is written
	older   = "log.1" // was written before

	// MaxSize is the size of each of the two files in bytes.
	MaxSize = 10 << 20

	maxText = 16 << 10       // bytes of the text of a line; more is written as several parts
	maxLine = maxText + 1<<8 // bytes of a line in a file

	// The streams.
	stdout = "stdout"
	stderr = "stderr"
)

// appendEntry appends what a stream has written to lines of a file.
func appendEntry(to []byte, at time.Time, stream string, data []byte) []byte {
	for len(data) > 0 {
		text, rest, full := bytes.Cut(data, []byte{'\n'})
		if len(text) > maxText {
			text, rest, full = data[:maxText], data[maxText:], false
		}
		to = at.UTC().AppendFormat(to, time.RFC3339Nano)
		to = append(append(append(to, ' '), stream...), ' ')
		if full {
			to = append(to, 'F', ' ')
		} else {
			to = append(to, 'P', ' ')
		}
		to = append(append(to, text...), '\n')
		data = rest
	}
	return to
}

// parse returns the entry of a line of a file, without its newline. False: it is none.
func parse(line []byte) (container.LogEntry, bool) {
	stamp, rest, _ := bytes.Cut(line, []byte{' '})
	stream, rest, _ := bytes.Cut(rest, []byte{' '})
	tag, text, ok := bytes.Cut(rest, []byte{' '})
	if !ok || len(line) > maxLine {
		return container.LogEntry{}, false
	}
	at, err := time.Parse(time.RFC3339Nano, string(stamp))
	if err != nil {
		return container.LogEntry{}, false
	}
	e := container.LogEntry{Time: at}
	switch string(stream) {
	case stdout, stderr:
		e.Stream = string(stream)
	default:
		return container.LogEntry{}, false
	}
	switch string(tag) {
	case "F":
		e.Data = append(append(make([]byte, 0, len(text)+1), text...), '\n')
	case "P":
		e.Data = bytes.Clone(text)
	default:
		return container.LogEntry{}, false
	}
	return e, true
}
