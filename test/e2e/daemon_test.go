//go:build e2e

package e2e

import (
	"bytes"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"syscall"
	"time"

	"github.com/rogpeppe/go-internal/testscript"
)

// daemons are the processes that a script started by name. They end with the script.
type daemons struct {
	own     string // the script's $OWN
	running map[string]*background
}

type daemonsKey struct{}

// background is one such process.
type background struct {
	cmd  *exec.Cmd
	done chan struct{} // closed when it has ended
	err  error         // its result, valid once done is closed
}

// daemonEnd is how long a daemon may take to end after SIGTERM or SIGINT.
const daemonEnd = 240 * time.Second

// daemon controls a long-running process of the script, whose output goes to the file $WORK/NAME.log:
//
//	daemon start NAME CMD ARGS...
//	daemon stop|interrupt NAME     sends SIGTERM or SIGINT and waits for the end, which must be a success, with ! a failure
//	daemon kill NAME               sends SIGKILL and waits
//	daemon wait NAME               waits until it ends by itself, with success or, with !, failure
//	daemon pid NAME                prints its pid for setenvout
func daemon(ts *testscript.TestScript, neg bool, args []string) {
	if len(args) < 2 {
		ts.Fatalf("usage: daemon start|stop|interrupt|kill|wait|pid NAME ...")
	}
	ds := ts.Value(daemonsKey{}).(*daemons)
	verb, name := args[0], args[1]
	if verb == "start" {
		ds.start(ts, name, args[2:])
		return
	}
	b := ds.running[name]
	if b == nil {
		ts.Fatalf("no daemon %s is running", name)
	}
	switch verb {
	case "pid":
		ts.Check(ts.Exec("echo", strconv.Itoa(b.cmd.Process.Pid)))
		return
	case "kill":
		ts.Check(b.cmd.Process.Kill())
		<-b.done
		delete(ds.running, name)
		return
	case "stop":
		ts.Check(b.cmd.Process.Signal(syscall.SIGTERM))
	case "interrupt":
		ts.Check(b.cmd.Process.Signal(syscall.SIGINT))
	case "wait":
	default:
		ts.Fatalf("daemon %s: unknown verb", verb)
	}
	select {
	case <-b.done:
	case <-time.After(daemonEnd):
		ts.Fatalf("%s did not end within %v", name, daemonEnd)
	}
	delete(ds.running, name)
	if failed := b.err != nil; failed != neg {
		out, _ := os.ReadFile(ts.MkAbs(name + ".log"))
		ts.Fatalf("%s ended with %v:\n%s", name, b.err, tail(out))
	}
}

func (ds *daemons) start(ts *testscript.TestScript, name string, argv []string) {
	if len(argv) == 0 || ds.running[name] != nil {
		ts.Fatalf("usage: daemon start NAME CMD ARGS..., once")
	}
	path := argv[0]
	if built := filepath.Join(bin(), path); filepath.Base(path) == path {
		if _, err := os.Stat(built); err == nil {
			path = built
		}
	}
	out, err := os.OpenFile(ts.MkAbs(name+".log"), os.O_CREATE|os.O_APPEND|os.O_WRONLY, 0o600)
	ts.Check(err)
	defer out.Close()
	cmd := exec.Command(path, argv[1:]...)
	cmd.Stdout, cmd.Stderr, cmd.Dir = out, out, ts.MkAbs(".")
	cmd.Env = os.Environ()
	for _, k := range []string{"PATH", "HOME", "OWN", "COCOON_DIR", "KUBECONFIG", "VK_NODE_NAME", "ORIGIN_PASSWORD"} {
		if v := ts.Getenv(k); v != "" {
			cmd.Env = append(cmd.Env, k+"="+v)
		}
	}
	// Its own process group: a signal to the test's group must not reach it.
	cmd.SysProcAttr = &syscall.SysProcAttr{Setpgid: true}
	ts.Check(cmd.Start())
	b := &background{cmd: cmd, done: make(chan struct{})}
	go func() {
		b.err = cmd.Wait()
		close(b.done)
	}()
	ds.running[name] = b
}

// end stops the processes that a script left running, and empties the engine that $OWN/engine.yaml may describe.
func (ds *daemons) end(t testscript.T) {
	for name, b := range ds.running {
		_ = b.cmd.Process.Signal(syscall.SIGTERM)
		select {
		case <-b.done:
		case <-time.After(daemonEnd):
			t.Log("killed at the end of the script:", name)
			_ = b.cmd.Process.Kill()
			<-b.done
		}
	}
	config := filepath.Join(ds.own, "engine.yaml")
	if _, err := os.Stat(config); err != nil {
		return
	}
	if out, err := exec.Command(filepath.Join(bin(), "cocoond"), "shutdown", "--config", config).CombinedOutput(); err != nil {
		t.Log("shutdown:", err, string(out))
	}
}

// tail is the end of a log, short enough to read in a test's output.
func tail(log []byte) []byte {
	lines := bytes.Split(log, []byte("\n"))
	return bytes.Join(lines[max(0, len(lines)-30):], []byte("\n"))
}
