package textui

import (
	"os"

	"golang.org/x/term"

	"cocoonstack.io/cocoon/internal/errdefs"
)

// File returns the open file behind a stream, nil if there is none, as in tests.
func File(stream any) *os.File {
	f, _ := stream.(*os.File)
	return f
}

// IsTerminal reports whether a stream is a terminal.
func IsTerminal(stream any) bool {
	f := File(stream)
	return f != nil && term.IsTerminal(int(f.Fd()))
}

// RawTerminal passes the keys of stdin on unchanged until restore is called, if it is a terminal.
func RawTerminal(stdin any) (restore func(), err error) {
	f := File(stdin)
	if !IsTerminal(stdin) {
		return func() {}, nil
	}
	state, err := term.MakeRaw(int(f.Fd()))
	if err != nil {
		return nil, errdefs.New(errdefs.Internal, "set the terminal to raw mode: %w", err)
	}
	return func() { _ = term.Restore(int(f.Fd()), state) }, nil
}

// WindowSize returns the size of the first stream that is a terminal, 0 if none is.
func WindowSize(streams ...any) (rows, cols uint16) {
	for _, stream := range streams {
		if f := File(stream); f != nil {
			if w, h, err := term.GetSize(int(f.Fd())); err == nil {
				return uint16(min(h, 1<<16-1)), uint16(min(w, 1<<16-1))
			}
		}
	}
	return 0, 0
}
