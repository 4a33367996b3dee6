package guestagent

import (
	"io"
	"os"
	"strings"

	guestv1 "cocoonstack.io/cocoon/api/guest/v1"
	"cocoonstack.io/cocoon/internal/vm"
)

// message is how a container says why a run ended, as for a kubelet: by a file that it writes, or by the end of its output.
type message struct {
	file    *os.File // nil: none
	fromLog bool     // the output serves when a run fails without a message
}

// How much of the output serves as message, the same as with a kubelet.
const (
	messageLines = 80
	messageBytes = 2 << 10
)

// messageOf shows the file for the message of a container whose root is folder.
func (s *Server) messageOf(folder string, c *guestv1.Container) (m message, err error) {
	m.fromLog = c.GetMessageFromLog()
	if c.GetMessagePath() == "" {
		return m, nil
	}
	if s.cfg.Volumes == nil {
		return m, errNoVolumes()
	}
	m.file, err = s.cfg.Volumes.Message(folder, c.GetMessagePath())
	return m, err
}

// clear forgets the message of an earlier run.
func (m message) clear() {
	if m.file != nil {
		_ = m.file.Truncate(0) // it is ours, in memory
	}
}

// read returns the message of the run that has ended. log is the output of the run.
func (m message) read(failed bool, log *ring) string {
	var text []byte
	if m.file != nil {
		text, _ = io.ReadAll(io.NewSectionReader(m.file, 0, vm.MaxMessage))
	}
	if len(text) == 0 && failed && m.fromLog {
		return log.tail(messageLines, messageBytes)
	}
	return strings.ToValidUTF8(string(text), "\uFFFD")
}
