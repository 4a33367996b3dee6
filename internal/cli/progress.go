package cli

import (
	"context"
	"io"
	"os"
	"sync"
	"time"

	"github.com/schollz/progressbar/v3"
	"golang.org/x/term"
)

const (
	barPause   = 100 * time.Millisecond // between two drawings
	barWidth   = 30
	spinnerLag = 2 * time.Second // shorter operations show nothing
)

// bar draws one line for each phase of a transfer, with the rate and, if the size is known, the time that is left.
// Nothing else draws. A nil bar draws nothing; it is used where nobody watches.
type bar struct {
	out   *os.File
	name  string
	phase string
	total int64
	line  *progressbar.ProgressBar
}

// bar returns a bar for operations on name, nil if standard error is no terminal.
func (a *app) bar(name string, quiet bool) *bar {
	f := file(a.Stderr)
	if quiet || f == nil || !term.IsTerminal(int(f.Fd())) {
		return nil
	}
	return &bar{out: f, name: name}
}

// show draws the progress of phase, in bytes; a total that is not positive means unknown.
func (b *bar) show(phase string, done, total int64) {
	if b == nil {
		return
	}
	if total <= 0 {
		total = -1 // a spinner
	}
	if b.line == nil || phase != b.phase || total != b.total {
		b.clear()
		b.phase, b.total = phase, total
		b.line = newLine(b.out, phase+" "+b.name, total, progressbar.OptionShowBytes(true), progressbar.OptionSetPredictTime(true))
	}
	_ = b.line.Set64(done)
}

// counter returns show for one phase, for functions that report bytes: nil if nothing is drawn.
func (b *bar) counter(phase string, total int64) func(int64) {
	if b == nil {
		return nil
	}
	return func(n int64) { b.show(phase, n, total) }
}

// clear removes the line.
func (b *bar) clear() {
	if b != nil && b.line != nil {
		_ = b.line.Clear()
	}
}

func newLine(out *os.File, what string, total int64, more ...progressbar.Option) *progressbar.ProgressBar {
	return progressbar.NewOptions64(total, append([]progressbar.Option{
		progressbar.OptionSetWriter(out), progressbar.OptionSetDescription(cell(what)), progressbar.OptionThrottle(barPause),
		progressbar.OptionClearOnFinish(), progressbar.OptionSetWidth(barWidth), progressbar.OptionSetRenderBlankState(true),
	}, more...)...)
}

// waiting shows on a terminal that what is still in progress, after a short delay, until stop is called.
func (a *app) waiting(ctx context.Context, what string) (stop func()) {
	f := file(a.Stderr)
	if f == nil || !term.IsTerminal(int(f.Fd())) {
		return func() {}
	}
	ctx, cancel := context.WithCancel(ctx)
	var wg sync.WaitGroup
	wg.Go(func() {
		select {
		case <-time.After(spinnerLag):
		case <-ctx.Done():
			return
		}
		line := newLine(f, what, -1, progressbar.OptionSetElapsedTime(true))
		defer func() { _ = line.Clear() }()
		tick := time.NewTicker(barPause)
		defer tick.Stop()
		for {
			select {
			case <-tick.C:
				_ = line.Add(1)
			case <-ctx.Done():
				return
			}
		}
	})
	return func() { cancel(); wg.Wait() }
}

// sized counts what is written.
type sized struct {
	to   io.Writer
	n    int64
	seen func(int64) // may be nil
}

func (s *sized) Write(p []byte) (int, error) {
	n, err := s.to.Write(p)
	s.n += int64(n)
	if s.seen != nil {
		s.seen(s.n)
	}
	return n, err
}
