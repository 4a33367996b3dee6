package textui

import (
	"context"
	"io"
	"os"
	"strings"
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

// Bar draws one line for each phase of a transfer, with the rate and, if the size is known, the time that is left.
// Nothing else draws. A nil bar draws nothing; it is used where nobody watches.
type Bar struct {
	out   *os.File
	name  string
	phase string
	total int64
	line  *progressbar.ProgressBar
}

// NewBar returns a bar for operations on name that is drawn on w, nil if w is no terminal or quiet is set.
func NewBar(w io.Writer, name string, quiet bool) *Bar {
	f := File(w)
	if quiet || f == nil || !term.IsTerminal(int(f.Fd())) {
		return nil
	}
	return &Bar{out: f, name: name}
}

// Show draws the progress of phase, in bytes; a total that is not positive means unknown.
func (b *Bar) Show(phase string, done, total int64) {
	if b == nil {
		return
	}
	if total <= 0 {
		total = -1 // a spinner
	}
	if b.line == nil || phase != b.phase || total != b.total {
		b.Clear()
		b.phase, b.total = phase, total
		b.line = newLine(b.out, phase+" "+b.name, total, progressbar.OptionShowBytes(true), progressbar.OptionSetPredictTime(true))
	}
	_ = b.line.Set64(done)
}

// Percent draws the progress of phase, in percent.
func (b *Bar) Percent(phase string, percent int64) {
	if b == nil {
		return
	}
	const whole = 100
	if b.line == nil || phase != b.phase {
		b.Clear()
		b.phase, b.total = phase, whole
		b.line = newLine(b.out, strings.TrimSpace(phase+" "+b.name), whole)
	}
	_ = b.line.Set64(min(percent, whole))
}

// Counter returns Show for one phase, for functions that report bytes: nil if nothing is drawn.
func (b *Bar) Counter(phase string, total int64) func(int64) {
	if b == nil {
		return nil
	}
	return func(n int64) { b.Show(phase, n, total) }
}

// Clear removes the line.
func (b *Bar) Clear() {
	if b != nil && b.line != nil {
		_ = b.line.Clear()
	}
}

func newLine(out *os.File, what string, total int64, more ...progressbar.Option) *progressbar.ProgressBar {
	return progressbar.NewOptions64(total, append([]progressbar.Option{
		progressbar.OptionSetWriter(out), progressbar.OptionSetDescription(Cell(what)), progressbar.OptionThrottle(barPause),
		progressbar.OptionClearOnFinish(), progressbar.OptionSetWidth(barWidth), progressbar.OptionSetRenderBlankState(true),
	}, more...)...)
}

// Waiting shows on w, if it is a terminal, that what is still in progress, after a short delay, until stop is called.
func Waiting(ctx context.Context, w io.Writer, what string) (stop func()) {
	f := File(w)
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

// Counter counts what is written to To.
type Counter struct {
	To   io.Writer
	N    int64       // bytes so far
	Seen func(int64) // is told N; nil: nobody
}

func (s *Counter) Write(p []byte) (int, error) {
	n, err := s.To.Write(p)
	s.N += int64(n)
	if s.Seen != nil {
		s.Seen(s.N)
	}
	return n, err
}
