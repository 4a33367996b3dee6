//go:build e2e

// Package e2e runs the scripts in testdata against a real control plane, the real daemons and real guests, with an
// unmodified kubectl. It contains no product logic. A script reads like the commands of a user.
//
// It needs root, `make build`, and a network namespace of its own: hack/test.sh e2e provides all of it.
package e2e

import (
	"context"
	"errors"
	"fmt"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	"github.com/rogpeppe/go-internal/testscript"

	"cocoonstack.io/cocoon/internal/hypervisor/jail"
	"cocoonstack.io/cocoon/internal/testkit/need"
)

// bin is the folder where `make build` puts the binaries.
func bin() string {
	dir, err := filepath.Abs(filepath.Join("..", "..", "bin"))
	if err != nil {
		panic(err)
	}
	return dir
}

// shared is the cluster that most scripts use. Scripts that kill or stop daemons start their own (`[own]` in the name).
var shared struct {
	once sync.Once
	dir  string
	err  error
	late []error // errors of the cleanup after a script, when no test is left to fail
}

// scripts counts the scripts that were set up.
var scripts atomic.Int32

func TestMain(m *testing.M) {
	code := m.Run()
	for _, err := range shared.late {
		fmt.Fprintf(os.Stderr, "after a script: %v\n", err)
		code = 1
	}
	if shared.dir != "" {
		if out, err := exec.Command(filepath.Join(bin(), "cocoon"), "down", "--dir", shared.dir).CombinedOutput(); err != nil {
			fmt.Fprintf(os.Stderr, "down: %v\n%s", err, out)
			code = 1
		}
		if code == 0 {
			_ = os.RemoveAll(shared.dir)
		} else {
			fmt.Fprintf(os.Stderr, "logs are in %s/log\n", shared.dir)
		}
	}
	os.Exit(code)
}

func sharedCluster() (string, error) {
	shared.once.Do(func() {
		if shared.dir, shared.err = os.MkdirTemp("", "cocoon-e2e-"); shared.err != nil {
			return
		}
		share := filepath.Join(shared.dir, "share") // guests may have it
		if shared.err = os.Mkdir(share, 0o755); shared.err != nil {
			return
		}
		out, err := exec.Command(filepath.Join(bin(), "cocoon"), "up", "--dir", shared.dir, "--detach", "--extra-config", "etcd.unsafe-no-fsync=true", "--with", "metrics-server,snapshot-controller", "--allow-images", "127.0.0.1", "--host-paths", share).CombinedOutput()
		if err != nil {
			shared.err = fmt.Errorf("cocoon up: %w\n%s", err, out)
		}
	})
	return shared.dir, shared.err
}

func TestScripts(t *testing.T) {
	scriptsIn(t, "testdata", func(env *testscript.Env) error { return errors.Join(setup(env), plugins(t, env), exports(t, env)) })
}

func scriptsIn(t *testing.T, dir string, setup func(*testscript.Env) error) {
	if os.Geteuid() != 0 {
		t.Fatal("the e2e tests need root; run them with `make test-e2e`")
	}
	testscript.Run(t, testscript.Params{
		Dir:   dir,
		Setup: setup,
		Cmds: map[string]func(*testscript.TestScript, bool, []string){
			"eventually": eventually,
			"cluster":    cluster,
			"kill9":      kill9,
			"setenvout":  setenvout,
			"daemon":     daemon,
			"guest":      guest,
			"nfs-server": nfsServer,
			"viewer":     viewer,
			"picture":    picture,
		},
		RequireExplicitExec: true,
		Condition: func(cond string) (bool, error) {
			if name, ok := strings.CutPrefix(cond, "set:"); ok { // a variable of the test
				return os.Getenv(name) != "", nil
			}
			if cond == "kvm" {
				return jail.ReadKVM().Problem() == "", nil
			}
			return false, fmt.Errorf("unknown condition %q", cond)
		},
	})
}

// setup gives each script the binaries on PATH. `cluster shared` or `cluster own` then names a cluster.
func setup(env *testscript.Env) error {
	env.Setenv("PATH", strings.Join(append([]string{bin(), os.Getenv("PATH")}, need.HypervisorDirs()...), ":"))
	env.Setenv("BIN", bin())
	env.Setenv("HOME", env.WorkDir)
	examples, err := filepath.Abs(filepath.Join("..", "..", "examples"))
	if err != nil {
		return err
	}
	env.Setenv("EXAMPLES", examples)
	// A script's folder has a long path, and socket paths must be short, so the script's own cluster is in a short one.
	own, err := os.MkdirTemp("", "cocoon-e2e-own-")
	if err != nil {
		return err
	}
	env.Setenv("OWN", own)
	// When a cluster is down, another script may take its default ports. A script that needs the same ports again uses these.
	first := 20000 + 10*int(scripts.Add(1))
	for i, name := range []string{"API_PORT", "NODE_PORT", "METRICS_PORT"} {
		env.Setenv(name, strconv.Itoa(first+i))
	}
	ds := &daemons{own: own, running: map[string]*background{}}
	env.Values[daemonsKey{}] = ds
	env.Values[viewersKey{}] = map[string]net.Conn{}
	env.Defer(func() {
		ds.end(env.T())
		if _, err := os.Stat(filepath.Join(own, "up.json")); err == nil {
			showLogs(env.T(), own)
			if out, err := exec.Command(filepath.Join(bin(), "cocoon"), "down", "--dir", own).CombinedOutput(); err != nil {
				env.T().Log("down:", err, string(out))
			}
		}
		_ = os.RemoveAll(own)
	})
	return nil
}

// showLogs prints the ends of the logs of a cluster whose script has failed: the cluster is about to go.
func showLogs(t testscript.T, dir string) {
	if one, ok := t.(interface{ Failed() bool }); !ok || !one.Failed() {
		return
	}
	logs, _ := filepath.Glob(filepath.Join(dir, "log", "*.log"))
	for _, log := range logs {
		out, _ := exec.Command("tail", "-n", "40", log).CombinedOutput()
		t.Log(filepath.Base(log) + ":\n" + string(out))
	}
}

// cluster selects the script's cluster. `cluster shared` is the one that scripts share (the first script starts it), with
// a namespace of the script that is removed at its end. `cluster own` is at $OWN; the script starts it itself.
func cluster(ts *testscript.TestScript, neg bool, args []string) {
	if neg || len(args) != 1 {
		ts.Fatalf("usage: cluster shared|own")
	}
	dir := ts.Getenv("OWN")
	if args[0] == "shared" {
		var err error
		if dir, err = sharedCluster(); err != nil {
			ts.Fatalf("%v", err)
		}
	}
	ts.Setenv("COCOON_DIR", dir)
	ts.Setenv("KUBECONFIG", filepath.Join(dir, "kubeconfig"))
	if args[0] != "shared" {
		return
	}
	ns := strings.ReplaceAll(ts.Name(), "_", "-")
	ts.Setenv("NS", ns)
	kubectl := func(args ...string) error {
		cmd := exec.Command(filepath.Join(bin(), "kubectl"), append([]string{"--kubeconfig", filepath.Join(dir, "kubeconfig")}, args...)...)
		if out, err := cmd.CombinedOutput(); err != nil {
			return fmt.Errorf("kubectl %v: %w\n%s", args, err, out)
		}
		return nil
	}
	ts.Check(kubectl("create", "namespace", ns))
	ts.Defer(func() {
		if err := kubectl("delete", "namespace", ns, "--wait=true", "--timeout=600s"); err != nil {
			shared.late = append(shared.late, fmt.Errorf("%s: %w", ts.Name(), err))
		}
	})
	waitFor(ts, busy*time.Minute, regexp.MustCompile(`default`), []string{"kubectl", "get", "serviceaccount", "default", "-n", ns, "-o", "name"})
	ts.Check(kubectl("config", "view"))
}

const (
	// busy is the factor by which timeouts are longer than a quiet machine needs.
	busy = 10
	// longest is the longest of these timeouts: a test has a limit, too.
	longest = 21 * time.Minute
)

// eventually runs a command again and again until its output matches: eventually 30s REGEXP CMD ARGS... The duration is
// the one for a quiet machine.
func eventually(ts *testscript.TestScript, neg bool, args []string) {
	if neg || len(args) < 3 {
		ts.Fatalf("usage: eventually DURATION REGEXP CMD ARGS...")
	}
	limit, err := time.ParseDuration(args[0])
	ts.Check(err)
	re, err := regexp.Compile(`(?m)` + args[1])
	ts.Check(err)
	waitFor(ts, min(busy*limit, longest), re, args[2:])
}

func waitFor(ts *testscript.TestScript, limit time.Duration, re *regexp.Regexp, argv []string) {
	deadline := time.Now().Add(limit)
	for {
		began := time.Now()
		err := ts.Exec(argv[0], argv[1:]...)
		out := ts.ReadFile("stdout")
		if err == nil && re.MatchString(strings.TrimSuffix(out, "\n")) { // else ^$ would match after the last line
			return
		}
		if time.Now().After(deadline) {
			ts.Fatalf("%v did not print %s within %v; last:\n%s%s", argv, re, limit, out, ts.ReadFile("stderr"))
		}
		// Polling takes CPU time from the awaited work: one kubectl costs a fifth of a second.
		<-time.After(min(max(200*time.Millisecond, 3*time.Since(began)), 3*time.Second))
	}
}

// kill9 sends SIGKILL to the one process of this cluster whose command line matches: kill9 cocoond
func kill9(ts *testscript.TestScript, neg bool, args []string) {
	if neg || len(args) != 1 {
		ts.Fatalf("usage: kill9 NAME")
	}
	pid := pidOf(ts, args[0], ts.Getenv("COCOON_DIR"))
	ts.Check(syscall.Kill(pid, syscall.SIGKILL))
	// The supervisor reaps the process: wait until its pid is free or reused.
	ctx, cancel := context.WithTimeout(context.Background(), time.Minute)
	defer cancel()
	for syscall.Kill(pid, 0) == nil {
		if ctx.Err() != nil {
			ts.Fatalf("%s (%d) survives SIGKILL", args[0], pid)
		}
		<-time.After(10 * time.Millisecond)
	}
}

// pidOf finds the process whose executable is bin/name and whose arguments or environment name dir.
func pidOf(ts *testscript.TestScript, name, dir string) int {
	procs, err := filepath.Glob("/proc/[0-9]*/cmdline")
	ts.Check(err)
	for _, p := range procs {
		cmdline, err := os.ReadFile(p)
		if err != nil {
			continue
		}
		argv := strings.Split(string(cmdline), "\x00")
		if filepath.Base(argv[0]) == name && strings.Contains(string(cmdline), dir) {
			pid, err := strconv.Atoi(filepath.Base(filepath.Dir(p)))
			ts.Check(err)
			return pid
		}
	}
	ts.Fatalf("no process %s of %s", name, dir)
	return 0
}

// setenvout sets a variable to what the last command printed: setenvout PID
func setenvout(ts *testscript.TestScript, neg bool, args []string) {
	if neg || len(args) != 1 {
		ts.Fatalf("usage: setenvout NAME")
	}
	ts.Setenv(args[0], strings.TrimSpace(ts.ReadFile("stdout")))
}
