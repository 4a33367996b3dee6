// Package console keeps what a machine says on its console, for tests that wait for words.
package console

import (
	"bytes"
	"strings"
	"sync"
)

// Console is a writer to which a machine's console goes.
type Console struct {
	mu   sync.Mutex
	text bytes.Buffer
	more chan struct{} // closed and replaced when there is more
}

// New returns a console that has said nothing.
func New() *Console { return &Console{more: make(chan struct{})} }

// Write implements io.Writer.
func (c *Console) Write(p []byte) (int, error) {
	c.mu.Lock()
	defer c.mu.Unlock()
	close(c.more)
	c.more = make(chan struct{})
	return c.text.Write(p)
}

// Said returns all that the console has said, without carriage returns, and a channel that is closed when there is more.
func (c *Console) Said() (string, <-chan struct{}) {
	c.mu.Lock()
	defer c.mu.Unlock()
	return strings.ReplaceAll(c.text.String(), "\r", ""), c.more
}
