// Package nfsserver starts a real NFS server in user space for tests: nfs-ganesha, as hack/nfs/build.sh has unpacked it. It serves
// versions 4.0, 4.1 and 4.2 over TCP, and needs no rpcbind and nothing of the host's kernel.
package nfsserver

import (
	"fmt"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"syscall"
	"testing"
	"time"

	"cocoonstack.io/cocoon/internal/testkit/need"
)

// patience limits how long a server may take to start.
const patience = 4 * time.Minute

// Addr and Addr6 are the addresses of the server. It is on a network of its own behind the network namespace of the test, which guests reach through
// their host: they cannot reach the addresses of the host itself.
const (
	Addr    = "198.51.100.2"
	Addr6   = "fd00:99::2"
	router  = "198.51.100.1"
	router6 = "fd00:99::1"
	link    = "nfs-test"
)

// Server is a server with one export, /data, at Addr and the usual port. Its methods are for the goroutine of the test.
type Server struct {
	Dir      string // the exported folder of the host
	Versions string // minor versions of NFS 4 that it supports, as in "0,1,2"; for the next Start

	t       testing.TB
	root    string // of the program
	state   string
	place   *exec.Cmd // holds the network namespace
	process *exec.Cmd
}

// New returns a server of dir, which does not run: its addresses refuse connections. There can be one server at a time.
func New(t testing.TB, dir string) *Server {
	t.Helper()
	need.Root(t)
	root := filepath.Dir(need.Built(t, "bin/nfs/root/ganesha.nfsd", "make nfs-server"))
	s := &Server{Dir: dir, Versions: "0,1,2", t: t, root: root, state: t.TempDir()}
	s.place = exec.Command("sleep", "3600")
	s.place.SysProcAttr = &syscall.SysProcAttr{Cloneflags: syscall.CLONE_NEWNET}
	if err := s.place.Start(); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		s.Kill()
		_ = s.place.Process.Kill()
		_ = s.place.Wait()
		_ = exec.Command("ip", "link", "del", link).Run() // it goes with the namespace, but later
	})
	pid := strconv.Itoa(s.place.Process.Pid)
	for _, args := range [][]string{
		{"ip", "link", "add", link, "type", "veth", "peer", "name", "eth0", "netns", pid},
		{"ip", "addr", "add", router + "/24", "dev", link},
		{"ip", "addr", "add", router6 + "/64", "dev", link, "nodad"},
		{"ip", "link", "set", link, "up"},
		s.inside("ip", "addr", "add", Addr+"/24", "dev", "eth0"),
		s.inside("ip", "addr", "add", Addr6+"/64", "dev", "eth0", "nodad"),
		s.inside("ip", "link", "set", "lo", "up"),
		s.inside("ip", "link", "set", "eth0", "up"),
		s.inside("ip", "route", "add", "default", "via", router),
		s.inside("ip", "-6", "route", "add", "default", "via", router6),
	} {
		if out, err := exec.Command(args[0], args[1:]...).CombinedOutput(); err != nil {
			t.Fatalf("%v: %v\n%s", args, err, out)
		}
	}
	return s
}

// inside returns a command that runs in the namespace of the server.
func (s *Server) inside(args ...string) []string {
	return append([]string{"nsenter", "--target", strconv.Itoa(s.place.Process.Pid), "--net"}, args...)
}

// Start starts the server and waits until it accepts connections. It knows what it promised to clients before.
func (s *Server) Start() {
	s.t.Helper()
	config := filepath.Join(s.state, "ganesha.conf")
	text := fmt.Sprintf(`
NFS_CORE_PARAM { Protocols = 4; Enable_NLM = false; Enable_RQUOTA = false; Plugins_Dir = "%s/fsal"; }
NFSV4 { Graceless = true; Lease_Lifetime = 10; RecoveryRoot = "%s"; Minor_Versions = %s; Only_Numeric_Owners = true; UseGetpwnam = true; }
EXPORT { Export_Id = 1; Path = "%s"; Pseudo = "/data"; Access_Type = RW; Squash = No_Root_Squash; SecType = sys; Transports = TCP; Protocols = 4; FSAL { Name = VFS; } }
`, s.root, s.state, s.Versions, s.Dir)
	if err := os.WriteFile(config, []byte(text), 0o600); err != nil {
		s.t.Fatal(err)
	}
	log, err := os.OpenFile(s.logFile(), os.O_CREATE|os.O_APPEND|os.O_WRONLY, 0o600)
	if err != nil {
		s.t.Fatal(err)
	}
	defer log.Close()
	args := s.inside(filepath.Join(s.root, "ld.so"), "--library-path", filepath.Join(s.root, "lib"), filepath.Join(s.root, "ganesha.nfsd"),
		"-F", "-f", config, "-L", "STDOUT", "-p", filepath.Join(s.state, "pid"), "-N", "EVENT")
	s.process = exec.Command(args[0], args[1:]...)
	s.process.Stdout, s.process.Stderr = log, log
	if err := s.process.Start(); err != nil {
		s.t.Fatal(err)
	}
	limit := time.NewTimer(patience)
	defer limit.Stop()
	tick := time.NewTicker(50 * time.Millisecond)
	defer tick.Stop()
	for {
		if c, err := net.DialTimeout("tcp", Addr+":2049", time.Second); err == nil {
			_ = c.Close()
			return
		}
		select {
		case <-tick.C:
		case <-limit.C:
			s.t.Fatalf("the NFS server does not start:\n%s", s.Log())
		}
	}
}

// Kill ends the server at once. It does nothing if the server does not run.
func (s *Server) Kill() {
	if s.process == nil {
		return
	}
	_ = s.process.Process.Kill()
	_ = s.process.Wait()
	s.process = nil
}

// Hang lets the server answer nothing, while its machine accepts connections, and Continue ends that. Precondition: it runs.
func (s *Server) Hang() { _ = s.process.Process.Signal(syscall.SIGSTOP) }

// Continue ends what Hang began.
func (s *Server) Continue() { _ = s.process.Process.Signal(syscall.SIGCONT) }

func (s *Server) logFile() string { return filepath.Join(s.state, "log") }

// Log returns what the server has logged.
func (s *Server) Log() string {
	text, _ := os.ReadFile(s.logFile())
	return string(text)
}
