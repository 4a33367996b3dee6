package pid1

import (
	"bytes"
	"io"
	"os"
	"strings"
	"sync"
)

// console is where process 1 writes: the kernel's log, which all consoles show, and from which everybody can read it later. Before /dev is there it is what the
// kernel gave process 1.
type console struct {
	mu   sync.Mutex
	kmsg *os.File
}

func newConsole() *console { return &console{} }

// Console returns a writer to the person in front of the machine, for a child of process 1.
func Console() (io.Writer, error) {
	c := newConsole()
	return c, c.open()
}

// open starts to write to the kernel's log.
func (c *console) open() error {
	f, err := os.OpenFile("/dev/kmsg", os.O_WRONLY, 0)
	if err != nil {
		return err
	}
	c.mu.Lock()
	c.kmsg = f
	c.mu.Unlock()
	return os.WriteFile("/proc/sys/kernel/printk_devkmsg", []byte("on\n"), 0o644)
}

// Write writes lines. It never fails: there is nobody to tell.
func (c *console) Write(p []byte) (int, error) {
	c.mu.Lock()
	defer c.mu.Unlock()
	for line := range bytes.Lines(p) {
		line = bytes.TrimRight(line, "\n")
		if c.kmsg == nil {
			_, _ = os.Stderr.Write(append(line, '\n'))
			continue
		}
		level := "<6>"
		if strings.Contains(string(line), "level=ERROR") {
			level = "<3>"
		}
		_, _ = c.kmsg.WriteString(level + "pid1: " + string(line[:min(len(line), 900)]) + "\n") // the kernel takes a line of about 1 KiB
	}
	return len(p), nil
}
