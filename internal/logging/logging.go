// Package logging sets up log/slog the one way every binary of Cocoon uses it.
//
// Messages are constant and lower case; what varies goes into keys, and the keys come from one list:
// vm pod node driver image snapshot op dur err (plus component, set once per constructor).
// The package keeps no global logger; composition roots pass loggers down.
package logging

import (
	"io"
	"log/slog"

	"cocoonstack.io/cocoon/internal/errdefs"
)

// New returns a logger writing to w. level is debug, info, warn or error; format is text or json.
// Anything else is an InvalidArgument error.
func New(w io.Writer, level, format string) (*slog.Logger, error) {
	var l slog.Level
	if err := l.UnmarshalText([]byte(level)); err != nil {
		return nil, errdefs.Invalidf("invalid log level %q; use debug, info, warn or error", level)
	}
	opts := &slog.HandlerOptions{Level: l, ReplaceAttr: oneLine}
	switch format {
	case "text":
		return slog.New(slog.NewTextHandler(w, opts)), nil
	case "json":
		return slog.New(slog.NewJSONHandler(w, opts)), nil
	}
	return nil, errdefs.Invalidf("invalid log format %q; use text or json", format)
}

// oneLine shows an error as its message: slog's text handler would print the stack that some libraries' errors carry.
func oneLine(_ []string, a slog.Attr) slog.Attr {
	if err, ok := a.Value.Any().(error); ok && err != nil {
		a.Value = slog.StringValue(err.Error())
	}
	return a
}
