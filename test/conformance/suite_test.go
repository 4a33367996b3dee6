//go:build e2e || conformance

package conformance

import (
	"bufio"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"log"
	"net"
	"net/http"
	"os"
	"os/exec"
	"path"
	"path/filepath"
	"slices"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/google/go-containerregistry/pkg/name"
	"github.com/google/go-containerregistry/pkg/registry"
	"github.com/google/go-containerregistry/pkg/v1/remote"

	"cocoonstack.io/cocoon/internal/testkit/need"
)

// repository is where the stand-in images are. The run has a network namespace of its own, so the port is free.
const repository = "127.0.0.1:5000"

// suite is the cluster, the tests' program and where results are kept.
type suite struct {
	root, bin  string // the checkout; its bin
	dir        string // what hack/conformance/build.sh leaves, and the results
	kubeconfig string
	env        []string
	procs      string
	kubernetes string
}

func newSuite(ctx context.Context, t *testing.T) *suite {
	t.Helper()
	need.Root(t)
	need.Tun(t)
	s := &suite{bin: filepath.Dir(need.Built(t, "bin/cocoon", "make build")), procs: "3"}
	s.root, s.dir = filepath.Dir(s.bin), filepath.Join(s.bin, "conformance")
	need.Built(t, "bin/conformance/e2e.test", "make conformance-programs")
	if n := os.Getenv("PROCS"); n != "" {
		s.procs = n
	}
	tmp := t.TempDir()
	list := filepath.Join(tmp, "repositories.yaml")
	var repositories strings.Builder
	for key, path := range map[string]string{
		"promoterE2eRegistry": "/e2e", "buildImageRegistry": "/build", "gcEtcdRegistry": "/etcd", "gcRegistry": "", "sigStorageRegistry": "/storage",
		"privateRegistry": "/private", "dockerLibraryRegistry": "/library", "cloudProviderGcpRegistry": "/gcp",
	} {
		fmt.Fprintf(&repositories, "%s: %s%s\n", key, repository, path)
	}
	if err := os.WriteFile(list, []byte(repositories.String()), 0o600); err != nil {
		t.Fatal(err)
	}
	s.env = append(os.Environ(), "KUBE_TEST_REPO_LIST="+list, "HOME="+tmp)
	s.serveImages(ctx, t)
	s.up(ctx, t)
	return s
}

// serveImages puts a stand-in for each image that the tests may use, and that there is one for, into a registry.
func (s *suite) serveImages(ctx context.Context, t *testing.T) {
	t.Helper()
	l, err := net.Listen("tcp", repository)
	if err != nil {
		t.Fatal(err)
	}
	server := &http.Server{Handler: registry.New(registry.Logger(log.New(io.Discard, "", 0))), ReadHeaderTimeout: 10 * time.Second}
	ended := make(chan error, 1)
	go func() { ended <- server.Serve(l) }()
	t.Cleanup(func() {
		_ = server.Close()
		if err := <-ended; !errors.Is(err, http.ErrServerClosed) {
			t.Error(err)
		}
	})
	standins, err := images(sources{dir: s.dir, busybox: filepath.Join(s.bin, "guest", "busybox")})
	if err != nil {
		t.Fatal(err)
	}
	out, err := s.e2e(ctx, "--list-images").Output()
	if err != nil {
		t.Fatalf("list the images: %v", err)
	}
	for image := range strings.FieldsSeq(string(out)) {
		if !strings.HasPrefix(image, repository+"/") || strings.HasPrefix(image, repository+"/private/") {
			continue
		}
		ref, err := name.ParseReference(image, name.Insecure)
		if err != nil {
			t.Fatal(err)
		}
		img, ok := standins[path.Base(ref.Context().RepositoryStr())]
		if !ok {
			continue
		}
		if err := remote.Write(ref, img, remote.WithContext(ctx)); err != nil {
			t.Fatalf("push %s: %v", image, err)
		}
		t.Log("image", image)
	}
}

// up starts the cluster, whose nodes take any pod. One test needs two nodes.
func (s *suite) up(ctx context.Context, t *testing.T) {
	t.Helper()
	dir, err := os.MkdirTemp("", "cocoon-conformance-")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if out, err := exec.Command(filepath.Join(s.bin, "cocoon"), "down", "--dir", dir).CombinedOutput(); err != nil {
			t.Errorf("down: %v\n%s", err, out)
		}
		logs := filepath.Join(s.dir, "log")
		if err := errors.Join(os.RemoveAll(logs), os.CopyFS(logs, os.DirFS(filepath.Join(dir, "log"))), os.RemoveAll(dir)); err != nil {
			t.Error(err)
		}
		t.Log("the cluster's logs are in", logs)
	})
	out, err := exec.CommandContext(ctx, filepath.Join(s.bin, "cocoon"), "up", "--dir", dir, "--nodes", "2", "--detach", "--allow-images", "127.0.0.1").CombinedOutput()
	if err != nil {
		t.Fatalf("cocoon up: %v\n%s", err, out)
	}
	s.kubeconfig = filepath.Join(dir, "kubeconfig")
	var version struct{ GitVersion string }
	if err := json.Unmarshal([]byte(s.kubectl(ctx, t, "get", "--raw", "/version")), &version); err != nil {
		t.Fatal(err)
	}
	s.kubernetes = version.GitVersion
	s.kubectl(ctx, t, "taint", "nodes", "--all", "virtual-kubelet.io/provider-")
}

func (s *suite) kubectl(ctx context.Context, t *testing.T, args ...string) string {
	t.Helper()
	out, err := exec.CommandContext(ctx, filepath.Join(s.bin, "kubectl"), append([]string{"--kubeconfig", s.kubeconfig}, args...)...).CombinedOutput()
	if err != nil {
		t.Fatalf("kubectl %v: %v\n%s", args, err, out)
	}
	return string(out)
}

// e2e is a call of the tests' program.
func (s *suite) e2e(ctx context.Context, args ...string) *exec.Cmd {
	cmd := exec.CommandContext(ctx, filepath.Join(s.dir, "e2e.test"), args...)
	cmd.Env, cmd.Dir = s.env, s.dir
	return cmd
}

// run runs these tests, procs at once, and follows what they print.
func (s *suite) run(ctx context.Context, t *testing.T, label string, tests []string, procs string) ([]result, error) {
	output, err := os.Create(filepath.Join(s.dir, label+".log"))
	if err != nil {
		return nil, err
	}
	defer output.Close()
	report := label + ".report.json"
	_ = os.Remove(filepath.Join(s.dir, report))
	cmd := exec.CommandContext(ctx, filepath.Join(s.dir, "ginkgo"), "--procs="+procs, "--timeout=24h", "--no-color", "--silence-skips", "--seed=1", "--poll-progress-after=20m",
		"--output-dir="+s.dir, "--json-report="+report, "--focus="+exactly(tests), filepath.Join(s.dir, "e2e.test"), "--",
		"--provider=skeleton", "--kubeconfig="+s.kubeconfig, "--kubectl-path="+filepath.Join(s.bin, "kubectl"), "--disable-log-dump",
		"--node-schedulable-timeout=2m", "--system-pods-startup-timeout=2m", "--system-daemonsets-startup-timeout=1m", "--e2e-output-dir="+t.TempDir())
	cmd.Env, cmd.Dir = s.env, s.dir
	cmd.Stderr = cmd.Stdout
	cmd.SysProcAttr = &syscall.SysProcAttr{Setpgid: true}
	cmd.Cancel = func() error { return cmd.Process.Signal(syscall.SIGINT) } // it stops its tests
	cmd.WaitDelay = time.Minute
	pipe, err := cmd.StdoutPipe()
	if err != nil {
		return nil, err
	}
	cmd.Stderr = cmd.Stdout
	if err := cmd.Start(); err != nil {
		return nil, err
	}
	t.Logf("%s: %d tests, %s at once; their output is in %s", label, len(tests), procs, output.Name())
	lines := bufio.NewReader(pipe)
	for {
		line, err := lines.ReadString('\n')
		_, _ = output.WriteString(line)
		if err != nil {
			break
		}
	}
	ended := cmd.Wait()
	_ = syscall.Kill(-cmd.Process.Pid, syscall.SIGKILL) // a test's own processes, if it was interrupted
	f, err := os.Open(filepath.Join(s.dir, report))
	if err != nil {
		return nil, fmt.Errorf("ginkgo left no report (%w): see %s", ended, output.Name())
	}
	defer f.Close()
	results, err := readReport(f)
	return slices.DeleteFunc(results, func(r result) bool { return !slices.Contains(tests, r.Test) }), err
}
