package cocoon_test

import (
	"context"
	"fmt"
	"io"
	"log"
	"net"
	"net/http"
	"net/http/httptest"
	"os"
	"os/exec"
	"os/signal"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/google/go-containerregistry/pkg/registry"
	"github.com/rogpeppe/go-internal/testscript"

	"cocoonstack.io/cocoon/internal/app/cocoon"
	"cocoonstack.io/cocoon/internal/app/cocoond"
	"cocoonstack.io/cocoon/internal/testkit/need"
	"cocoonstack.io/cocoon/internal/testkit/ociimage"
)

// The scripts run the real binaries as processes: this test binary serves as both.
func TestMain(m *testing.M) {
	if os.Getenv("GORACE") == "" {
		os.Setenv("GORACE", "atexit_sleep_ms=0") // otherwise each process takes a second more under the race detector
	}
	play := func(main func(ctx context.Context) int) func() {
		return func() {
			ctx, stop := signal.NotifyContext(context.Background(), syscall.SIGINT, syscall.SIGTERM)
			code := main(ctx)
			stop()
			os.Exit(code)
		}
	}
	testscript.Main(m, map[string]func(){
		"cocoon": play(func(ctx context.Context) int {
			return cocoon.Main(ctx, os.Args[1:], os.Stdin, os.Stdout, os.Stderr)
		}),
		"cocoond": play(func(ctx context.Context) int { return cocoond.Main(ctx, os.Args[1:], os.Stdout, os.Stderr) }),
	})
}

// Each script has its own folder with a configuration for the fake driver, no network, and an image.
func TestScripts(t *testing.T) {
	need.Tool(t, "mkfs.ext4")
	testscript.Run(t, testscript.Params{
		Dir: "testdata/script",
		Setup: func(e *testscript.Env) error {
			e.Values[daemonKey{}] = &running{}
			e.Setenv("GORACE", os.Getenv("GORACE"))
			e.Setenv("COCOON_DIR", e.WorkDir)
			e.Setenv("REGISTRY", serveRegistry(e))
			config := fmt.Sprintf("stateDir: %[1]s/state\nrunDir: %[1]s/run\ngroup: nobody-has-this-group\ndriver: fake\n"+
				"guest: {kernel: %[1]s/kernel, initramfs: %[1]s/kernel}\nnetwork: {enabled: false}\n", e.WorkDir)
			if err := writePeers(e, config); err != nil {
				return err
			}
			img := ociimage.Image{
				Layers:     []ociimage.Layer{ociimage.Of(ociimage.Dir("bin"), ociimage.File("bin/hello", "#!"))},
				Entrypoint: []string{"/bin/hello"},
			}
			for name, data := range map[string][]byte{"cocoond.yaml": []byte(config), "kernel": []byte("k"), "demo.tar": img.OCI()} {
				if err := os.WriteFile(filepath.Join(e.WorkDir, name), data, 0o600); err != nil {
					return err
				}
			}
			return nil
		},
		Cmds: map[string]func(*testscript.TestScript, bool, []string){"daemon": startDaemon, "enddaemon": endDaemon, "runtimes": tryRuntimes},
	})
}

// serveRegistry is the script's own OCI registry, for the token "secret".
func serveRegistry(e *testscript.Env) (addr string) {
	inner := registry.New(registry.Logger(log.New(io.Discard, "", 0)))
	srv := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if r.Header.Get("Authorization") != "Bearer secret" {
			w.Header().Set("WWW-Authenticate", `Bearer realm="http://`+r.Host+`/v2/token"`)
			w.WriteHeader(http.StatusUnauthorized)
			return
		}
		inner.ServeHTTP(w, r)
	}))
	e.Defer(srv.Close)
	return srv.Listener.Addr().String()
}

// startDaemon is `daemon [ARG...]`: it starts cocoond and waits until it reports that it is ready.
func startDaemon(ts *testscript.TestScript, _ bool, args []string) {
	addr := &net.UnixAddr{Net: "unixgram", Name: ts.MkAbs("notify")}
	_ = os.Remove(addr.Name)
	notify, err := net.ListenUnixgram("unixgram", addr)
	ts.Check(err)
	defer notify.Close()
	path, err := exec.LookPath("cocoond")
	ts.Check(err)
	log, err := os.OpenFile(ts.MkAbs("log"), os.O_CREATE|os.O_APPEND|os.O_WRONLY, 0o600)
	ts.Check(err)
	defer log.Close()
	cmd := exec.Command(path, append([]string{"--config", ts.MkAbs("cocoond.yaml")}, args...)...)
	cmd.Env = append(os.Environ(), "NOTIFY_SOCKET="+addr.Name)
	cmd.Stderr = log
	ts.Check(cmd.Start())
	done := make(chan struct{})
	go func() { _ = cmd.Wait(); close(done); notify.Close() }()
	*ts.Value(daemonKey{}).(*running) = running{cmd.Process, done}
	ts.Defer(func() { _ = cmd.Process.Kill(); <-done })
	ts.Check(notify.SetReadDeadline(time.Now().Add(20 * time.Second)))
	buf := make([]byte, 64)
	n, err := notify.Read(buf)
	if err != nil || !strings.Contains(string(buf[:n]), "READY=1") {
		ts.Fatalf("cocoond did not become ready (%v):\n%s", err, ts.ReadFile("log"))
	}
}

// endDaemon is `enddaemon kill|term`.
func endDaemon(ts *testscript.TestScript, _ bool, args []string) {
	d := ts.Value(daemonKey{}).(*running)
	sig := syscall.SIGTERM
	if args[0] == "kill" {
		sig = syscall.SIGKILL
	}
	ts.Check(d.process.Signal(sig))
	select {
	case <-d.done:
	case <-time.After(20 * time.Second):
		ts.Fatalf("cocoond does not end:\n%s", ts.ReadFile("log"))
	}
}

// running is the daemon of one script.
type running struct {
	process *os.Process
	done    chan struct{}
}

// daemonKey finds a script's *running among its values.
type daemonKey struct{}
