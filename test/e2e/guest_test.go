//go:build e2e

package e2e

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"os/exec"
	"path/filepath"
	"regexp"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"github.com/rogpeppe/go-internal/testscript"
)

const (
	// typeAgain is how long a guest has for the answer to a line. One that still boots loses what is typed.
	typeAgain = 6 * time.Second
	// leaveTime is how long a console program may take to end after its escape character.
	leaveTime = busy * 10 * time.Second
	// escapeKey ends `cocoon vm console` and `virtctl console`.
	escapeKey = "\x1d"
)

// errGone says that the program that is connected to a console has ended.
var errGone = errors.New("the console is gone")

// typed numbers the lines. Each answer carries the number of its line, because a console shows earlier output first.
var typed atomic.Int64

// guest types a line into the shell at the console of a guest, again and again until what the line prints matches, and leaves by the
// escape character. The program connects to the console. The line may hold several lines. An empty one types nothing and looks at the
// whole screen. The duration is the one for a quiet machine.
//
//	guest DURATION REGEXP LINE PROGRAM ARGS...
//	guest 60s ^cpus-2 'echo cpus-$(nproc)' virtctl console web
func guest(ts *testscript.TestScript, neg bool, args []string) {
	if neg || len(args) < 4 {
		ts.Fatalf("usage: guest DURATION REGEXP LINE PROGRAM ARGS...")
	}
	limit, err := time.ParseDuration(args[0])
	ts.Check(err)
	re, err := regexp.Compile(`(?m)` + args[1])
	ts.Check(err)
	ctx, cancel := context.WithTimeout(context.Background(), min(busy*limit, longest))
	defer cancel()
	answer, screen, err := askGuest(ctx, ts, args[2], re, args[3:])
	if err != nil {
		ts.Fatalf("%v at %v: %v; the screen:\n%s", args[2], args[3:], err, screen)
	}
	fmt.Fprint(ts.Stdout(), answer)
}

// askGuest returns the answer to a line, and the screen. It connects again if the console goes: daemons end, and guests start anew.
func askGuest(ctx context.Context, ts *testscript.TestScript, line string, re *regexp.Regexp, argv []string) (answer, screen string, err error) {
	for {
		c, err := openConsole(ts, argv)
		if err != nil {
			return "", "", err
		}
		answer, err := c.ask(ctx, line, re)
		gone := errors.Is(err, errGone)
		if left := c.leave(); err == nil {
			err = left
		}
		if !gone || ctx.Err() != nil {
			return answer, c.screen(), err
		}
		<-time.After(time.Second)
	}
}

// console is a program that is connected to the console of a guest.
type console struct {
	cmd   *exec.Cmd
	in    io.Writer
	ended chan struct{}

	mu  sync.Mutex
	out bytes.Buffer
}

// openConsole starts the program with the environment of the script.
func openConsole(ts *testscript.TestScript, argv []string) (*console, error) {
	path := argv[0]
	if !strings.Contains(path, "/") {
		path = filepath.Join(bin(), path)
	}
	c := &console{cmd: exec.Command(path, argv[1:]...), ended: make(chan struct{})}
	c.cmd.Dir = ts.MkAbs(".")
	for _, name := range []string{"PATH", "HOME", "KUBECONFIG", "COCOON_DIR"} {
		c.cmd.Env = append(c.cmd.Env, name+"="+ts.Getenv(name))
	}
	c.cmd.Stdout, c.cmd.Stderr = c, c
	in, err := c.cmd.StdinPipe()
	if err != nil {
		return nil, err
	}
	c.in = in
	if err := c.cmd.Start(); err != nil {
		return nil, err
	}
	go func() {
		defer close(c.ended)
		_ = c.cmd.Wait() // virtctl returns an error for a console that was left
	}()
	return c, nil
}

// Write takes what the program prints.
func (c *console) Write(p []byte) (int, error) {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.out.Write(p)
}

// screen is what the program has printed, without carriage returns.
func (c *console) screen() string {
	c.mu.Lock()
	defer c.mu.Unlock()
	return strings.ReplaceAll(c.out.String(), "\r", "")
}

// ask types the line until its answer matches, and returns the answer.
func (c *console) ask(ctx context.Context, line string, re *regexp.Regexp) (string, error) {
	for {
		n := typed.Add(1)
		if line != "" {
			// The shell computes the marks, so that the screen shows them only when the line runs.
			if _, err := fmt.Fprintf(c.in, "echo; echo begin-$((%d+1))\n%s\necho; echo over-$((%[1]d+1))\n", n, line); err != nil {
				return "", errors.Join(errGone, err)
			}
		}
		for again := time.Now().Add(typeAgain); time.Now().Before(again); {
			answer, whole := c.screen(), true
			if line != "" {
				answer, whole = between(answer, fmt.Sprintf("\nbegin-%d\n", n+1), fmt.Sprintf("\nover-%d\n", n+1))
			}
			if whole && re.MatchString(strings.TrimSuffix(answer, "\n")) {
				return answer, nil
			}
			if whole { // another answer may follow soon
				again = time.Now()
			}
			select {
			case <-c.ended:
				return "", errGone
			case <-ctx.Done():
				return "", fmt.Errorf("nothing matches %v in time", re)
			case <-time.After(200 * time.Millisecond):
			}
		}
	}
}

// between is what s has between two marks, and whether it has both.
func between(s, begin, over string) (string, bool) {
	_, s, begun := strings.Cut(s, begin)
	s, _, ended := strings.Cut(s, over)
	return s, begun && ended
}

// leave ends the program by its escape character.
func (c *console) leave() error {
	_, _ = io.WriteString(c.in, escapeKey)
	select {
	case <-c.ended:
		return nil
	case <-time.After(leaveTime):
		_ = c.cmd.Process.Kill()
		<-c.ended
		return errors.New("the program does not end at the escape character")
	}
}
