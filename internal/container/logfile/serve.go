package logfile

import (
	"errors"
	"fmt"
	"io"
	"os"
	"os/signal"
	"sync"
	"syscall"
	"time"
)

// The descriptors that a shim of containerd gives to the program of a log (binary-v2 in its documentation of shims).
const (
	stdoutFD = 3 + iota
	stderrFD
	readyFD
)

// chunk is how much output is read at once, in bytes.
const chunk = 64 << 10

// Serve writes the log in dir until the container has ended and its last output was written. It is the whole work of the process that
// a shim starts for a container. The shim asks it to end by SIGTERM when it has closed its ends of the pipes; the end of the pipes comes
// after the last output, so that counts.
func Serve(dir string) error {
	signal.Ignore(syscall.SIGTERM, syscall.SIGHUP, syscall.SIGINT)
	w, err := open(dir, MaxSize)
	if err != nil {
		return err
	}
	ready := os.NewFile(readyFD, "ready")
	if _, err := ready.Write([]byte{1}); err != nil {
		return errors.Join(fmt.Errorf("tell the shim that the log is ready: %w", err), w.close())
	}
	ready.Close()
	return copyOutput(w, os.NewFile(stdoutFD, stdout), os.NewFile(stderrFD, stderr))
}

// copyOutput writes what both ends have, until both have ended.
func copyOutput(w *writer, out, errs io.Reader) error {
	var streams sync.WaitGroup
	for stream, r := range map[string]io.Reader{stdout: out, stderr: errs} {
		streams.Go(func() {
			buf := make([]byte, chunk)
			for {
				n, err := r.Read(buf)
				if n > 0 {
					w.write(time.Now(), stream, buf[:n])
				}
				if err != nil {
					return
				}
			}
		})
	}
	streams.Wait()
	return w.close()
}
