package vkcocoon

import (
	"context"
	"fmt"
	"log/slog"

	vklog "github.com/virtual-kubelet/virtual-kubelet/log"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/client-go/tools/record"
)

// vkLogger forwards virtual-kubelet's log to slog, one level lower: the provider itself logs what matters to an
// operator.
type vkLogger struct{ log *slog.Logger }

var _ vklog.Logger = vkLogger{}

func (l vkLogger) say(level slog.Level, text string) {
	if l.log.Enabled(context.Background(), level) {
		l.log.Log(context.Background(), level, "virtual-kubelet", "op", text)
	}
}

func (l vkLogger) Debug(a ...any)            { l.say(slog.LevelDebug-4, fmt.Sprint(a...)) }
func (l vkLogger) Debugf(f string, a ...any) { l.say(slog.LevelDebug-4, fmt.Sprintf(f, a...)) }
func (l vkLogger) Info(a ...any)             { l.say(slog.LevelDebug, fmt.Sprint(a...)) }
func (l vkLogger) Infof(f string, a ...any)  { l.say(slog.LevelDebug, fmt.Sprintf(f, a...)) }
func (l vkLogger) Warn(a ...any)             { l.say(slog.LevelInfo, fmt.Sprint(a...)) }
func (l vkLogger) Warnf(f string, a ...any)  { l.say(slog.LevelInfo, fmt.Sprintf(f, a...)) }
func (l vkLogger) Error(a ...any)            { l.say(slog.LevelWarn, fmt.Sprint(a...)) }
func (l vkLogger) Errorf(f string, a ...any) { l.say(slog.LevelWarn, fmt.Sprintf(f, a...)) }
func (l vkLogger) Fatal(a ...any)            { l.say(slog.LevelError, fmt.Sprint(a...)) }
func (l vkLogger) Fatalf(f string, a ...any) { l.say(slog.LevelError, fmt.Sprintf(f, a...)) }

func (l vkLogger) WithField(key string, v any) vklog.Logger { return vkLogger{l.log.With(key, v)} }
func (l vkLogger) WithError(err error) vklog.Logger         { return vkLogger{l.log.With("err", err)} }

func (l vkLogger) WithFields(f vklog.Fields) vklog.Logger {
	args := make([]any, 0, 2*len(f))
	for k, v := range f {
		args = append(args, k, v)
	}
	return vkLogger{l.log.With(args...)}
}

// silence drops virtual-kubelet's own events ("Create pod in provider successfully"): each costs a write, and the
// provider's events already say the same.
type silence struct{}

var _ record.EventRecorder = silence{}

func (silence) Event(runtime.Object, string, string, string)          {}
func (silence) Eventf(runtime.Object, string, string, string, ...any) {}
func (silence) AnnotatedEventf(runtime.Object, map[string]string, string, string, string, ...any) {
}
