package up

import (
	"bufio"
	"cmp"
	"context"
	"encoding/json"
	"fmt"
	"io"
	"os"
	"os/exec"
	"os/signal"
	"path/filepath"
	"strings"
	"syscall"
	"time"

	"github.com/spf13/cobra"
	"github.com/spf13/pflag"

	"cocoonstack.io/cocoon/internal/errdefs"
	"cocoonstack.io/cocoon/internal/logging"
)

// reportFD is the file descriptor on which a detached supervisor reports the progress of the start to its parent.
const reportFD = 3

// message is one line of that report.
type message struct {
	Step  string        `json:"step,omitempty"`
	Took  time.Duration `json:"took,omitempty"`
	Ready bool          `json:"ready,omitempty"`
	Error string        `json:"error,omitempty"`
	Class errdefs.Class `json:"class,omitempty"`
}

// Commands returns the verbs `up` and `down`, and a hidden one. dir is the CLI's global --dir (or COCOON_DIR) at the time of the call.
func Commands(dir func() string) []*cobra.Command {
	return []*cobra.Command{upCommand(dir), downCommand(dir), kubeletCommand(dir)}
}

func upCommand(dir func() string) *cobra.Command {
	var o Options
	var detach, supervise bool
	var nodes int
	var services, kubelet bool
	var csiPlugins, cniConfDir string
	cmd := &cobra.Command{
		Use:   "up [--dir DIR] [--detach]",
		Short: "Run a whole cluster on this machine: control plane and a virtual node whose pods are VMs",
		Long: `Run a real Kubernetes control plane and one virtual node, all under one folder. They listen on loopback
and, for the kubelet API, on the bridge of the node's VMs, where no guest can reach it.

The folder keeps the cluster: after a stop, a kill or a reboot the same command starts it again with its objects, VM
disks and certificates. DIR/kubeconfig is written when the node is Ready. The node is called cocoon-node-0 unless
--node-name or VK_NODE_NAME sets another name. A pod runs there if it tolerates virtual-kubelet.io/provider.

Pods reach each other, Services and the API server, and resolve names of the cluster. If this machine is the node of another cluster,
or another instance runs on it, the cluster goes without Services and says so.

The part manager serves CocoonSets and KubeVirt's VirtualMachines, and checks pods before the cluster has them.

With --kubelet there is another node, cocoon-kubelet-0: the kubelet, containerd with runc, and cocoond between them. Pods go there if
their runtimeClassName is cocoon, which makes them VMs, or runc. It has processes, mounts and a network of its own, so that a kubelet or a
containerd of this machine is not touched; examples/kubelet.yaml has one pod of each. It needs ` + "`make containerd`" + ` and CNI plugins.

Each node has the images cocoon/demo:latest, a container, and cocoon/disk-demo:latest, a disk that boots itself. They need no network.
The folder stores --nodes, --with, names and ports for the next start. The registry's token is in DIR/etc/epoch-tokens.`,
		Example: `  cocoon up --dir /var/lib/cocoon-demo            # until Ctrl-C
  cocoon up --dir /var/lib/cocoon-demo --detach   # returns when the node is Ready
  kubectl --kubeconfig /var/lib/cocoon-demo/kubeconfig get nodes
  cocoon up --dir /var/lib/cocoon-demo --kubelet  # a second node, with a real kubelet
  cocoon up --dir /tmp/three --nodes 3 --with epoch,manager,scheduler
  cocoon down --dir /var/lib/cocoon-demo`,
		Args: cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			if o.Dir = dir(); o.Dir == "" {
				return errdefs.Invalidf("--dir is missing; give the folder of the cluster: cocoon up --dir DIR")
			}
			o.Assets = FindAssets()
			if cmd.Flags().Changed("nodes") {
				o.Nodes = &nodes
			}
			if cmd.Flags().Changed("services") {
				o.Services = &services
			}
			if cmd.Flags().Changed("kubelet") {
				o.Kubelet = &kubelet
			}
			if cmd.Flags().Changed("csi-plugins") {
				o.CSIPlugins = &csiPlugins
			}
			if cmd.Flags().Changed("cni-conf-dir") {
				o.CNIConfDir = &cniConfDir
			}
			o.NodeName = cmp.Or(o.NodeName, os.Getenv("VK_NODE_NAME"))
			var err error
			switch {
			case supervise:
				return superviseDetached(cmd.Context(), o)
			case detach:
				err = runDetached(cmd.Context(), o, cmd.OutOrStdout())
			default:
				err = runForeground(cmd.Context(), o, cmd.OutOrStdout(), cmd.ErrOrStderr())
			}
			if errdefs.IsAlreadyExists(err) {
				printAlready(cmd.OutOrStdout(), err, o.Dir, cmd.Flags())
				return nil
			}
			return err
		},
	}
	f := cmd.Flags()
	f.BoolVarP(&detach, "detach", "d", false, "return when the node is Ready and keep running in the background")
	f.IntVar(&nodes, "nodes", 1, "number of virtual nodes; 0 runs the control plane alone")
	f.StringSliceVar(&o.With, "with", nil, "parts to run beside the control plane and the nodes, separated by commas: "+strings.Join(parts, ", ")+"\n(default "+strings.Join(usualParts, ",")+", or as the folder stores it; \"\" for none)")
	f.BoolVar(&services, "services", true, "serve Services and the cluster's DNS to pods; the default is to do so unless another program of this machine does;\nthe folder stores it for the next start")
	f.BoolVar(&kubelet, "kubelet", false, "run a second node, "+kubeletName+", with a kubelet and containerd, where pods with runtimeClassName cocoon are VMs and those with runc are containers;\nthe folder stores it for the next start")
	f.StringVar(&o.NodeName, "node-name", "", "name of the (first) virtual node (default "+defaultNodeName+", or VK_NODE_NAME)")
	f.IntVar(&o.APIPort, "api-port", 0, fmt.Sprintf("port of the API server on loopback (default %d, or the next free one)", defaultAPIPort))
	f.IntVar(&o.NodePort, "node-port", 0, fmt.Sprintf("port of the virtual node's kubelet API on its bridge (default %d, or the next free one)", defaultNodePort))
	f.IntVar(&o.MetricsPort, "metrics-port", 0, fmt.Sprintf("port of the virtual node's Prometheus metrics on loopback (default %d, or the next free one)", defaultMetricsPort))
	f.IntVar(&o.EpochPort, "epoch-port", 0, fmt.Sprintf("port of the registry on loopback (default %d, or the next free one)", defaultEpochPort))
	f.IntVar(&o.ManagerPort, "manager-port", 0, fmt.Sprintf("port of the manager's health checks on loopback (default %d, or the next free one)", defaultManagerPort))
	f.IntVar(&o.WebhookPort, "webhook-port", 0, fmt.Sprintf("port of the manager's admission webhooks on loopback (default %d, or the next free one)", defaultWebhookPort))
	f.StringArrayVar(&o.ExtraConfig, "extra-config", nil, "a flag of the control plane, as COMPONENT.FLAG=VALUE, e.g. controllerManager.node-monitor-grace-period=20s;\nmay be given several times; the folder stores it for the next start")
	f.StringSliceVar(&o.HostPaths, "host-paths", nil, "folders of this machine that pods may have by hostPath and local volumes: /PATH, NAMESPACE=/PATH, with :ro at the end for reading only;\nthe folder stores them for the next start, \"\" for none")
	f.StringVar(&csiPlugins, "csi-plugins", "", "folder in which CSI drivers of this machine register, so that pods may have their volumes;\nthe folder of the cluster stores it for the next start, \"\" for none")
	f.StringVar(&cniConfDir, "cni-conf-dir", "", "folder of CNI conflists, such as /etc/cni/net.d: each is a network of its name, which pods may have beside that of the node;\nthe folder of the cluster stores it for the next start, \"\" for none")
	f.StringSliceVar(&o.AllowImages, "allow-images", nil, "networks, addresses and HOST[:PORT] that images of pods may come from in addition to public addresses, e.g. 192.168.7.0/24,localhost:5000;\nthe folder stores them for the next start, \"\" for none")
	f.IntVar(&o.CPUOvercommit, "cpu-overcommit", 0, fmt.Sprintf("virtual CPUs that pods may request for each CPU of this machine (default %d);\nthe folder stores it for the next start", defaultOvercommit))
	f.BoolVar(&supervise, "supervise", false, "")
	_ = f.MarkHidden("supervise")
	return cmd
}

func downCommand(dir func() string) *cobra.Command {
	return &cobra.Command{
		Use:   "down --dir DIR",
		Short: "Stop a cluster that `cocoon up` started: VMs, daemons, links and rules; its data stays",
		Args:  cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			if dir() == "" {
				return errdefs.Invalidf("--dir is missing; give the folder of the cluster: cocoon down --dir DIR")
			}
			return Down(cmd.Context(), dir(), FindAssets())
		},
	}
}

func printStep(w io.Writer) Report {
	return func(step string, took time.Duration) { fmt.Fprintf(w, "%8.2fs  %s\n", took.Seconds(), step) }
}

func printReady(w io.Writer, dir string) {
	fmt.Fprintf(w, "\nThe cluster is up. Use it with\n\n  export KUBECONFIG=%s\n  kubectl get nodes\n", kubeconfigOf(dir))
}

// printAlready says that the instance runs, and which flags had no effect for that reason.
func printAlready(w io.Writer, already error, dir string, flags *pflag.FlagSet) {
	fmt.Fprintln(w, already)
	var idle []string
	flags.Visit(func(f *pflag.Flag) {
		if f.Name != "dir" && f.Name != "detach" {
			idle = append(idle, "--"+f.Name)
		}
	})
	if len(idle) > 0 {
		fmt.Fprintf(w, "It does not read %s while it runs: stop it with `cocoon down --dir %s`, then start it again with them.\n", strings.Join(idle, ", "), dir)
	}
	printReady(w, dir)
}

func runForeground(ctx context.Context, o Options, out, errOut io.Writer) error {
	ctx, stop := signal.NotifyContext(ctx, syscall.SIGINT, syscall.SIGTERM)
	defer stop()
	log, err := logging.New(errOut, "info", "text")
	if err != nil {
		return err
	}
	return Run(ctx, o, log, printStep(out), func() { printReady(out, o.Dir) })
}

// runDetached starts a supervisor in its own session and follows its report until the cluster is ready.
func runDetached(ctx context.Context, o Options, out io.Writer) error {
	if err := preflight(o); err != nil {
		return err
	}
	r, w, err := os.Pipe()
	if err != nil {
		return fmt.Errorf("create report pipe: %w", err)
	}
	defer r.Close()
	logDir := filepath.Join(o.Dir, "log")
	if err := os.MkdirAll(logDir, 0o700); err != nil {
		return fmt.Errorf("create log folder: %w", err)
	}
	logFile, err := os.OpenFile(filepath.Join(logDir, "up.log"), os.O_CREATE|os.O_APPEND|os.O_WRONLY, 0o600)
	if err != nil {
		return fmt.Errorf("open log: %w", err)
	}
	defer logFile.Close()
	exe, err := os.Executable()
	if err != nil {
		return fmt.Errorf("locate the cocoon binary: %w", err)
	}
	args := []string{"up", "--supervise", "--dir", o.Dir}
	for flag, v := range map[string]int{"--api-port": o.APIPort, "--node-port": o.NodePort, "--metrics-port": o.MetricsPort, "--epoch-port": o.EpochPort, "--manager-port": o.ManagerPort, "--webhook-port": o.WebhookPort} {
		if v != 0 {
			args = append(args, flag, fmt.Sprint(v))
		}
	}
	if o.CPUOvercommit != 0 {
		args = append(args, "--cpu-overcommit", fmt.Sprint(o.CPUOvercommit))
	}
	if o.NodeName != "" {
		args = append(args, "--node-name", o.NodeName)
	}
	if o.Nodes != nil {
		args = append(args, "--nodes", fmt.Sprint(*o.Nodes))
	}
	if o.Services != nil {
		args = append(args, fmt.Sprintf("--services=%t", *o.Services))
	}
	if o.Kubelet != nil {
		args = append(args, fmt.Sprintf("--kubelet=%t", *o.Kubelet))
	}
	if o.With != nil {
		args = append(args, "--with="+strings.Join(o.With, ","))
	}
	for _, text := range o.ExtraConfig {
		args = append(args, "--extra-config="+text)
	}
	if o.HostPaths != nil {
		args = append(args, "--host-paths="+strings.Join(o.HostPaths, ","))
	}
	if o.CSIPlugins != nil {
		args = append(args, "--csi-plugins="+*o.CSIPlugins)
	}
	if o.CNIConfDir != nil {
		args = append(args, "--cni-conf-dir="+*o.CNIConfDir)
	}
	if o.AllowImages != nil {
		args = append(args, "--allow-images="+strings.Join(o.AllowImages, ","))
	}
	cmd := exec.Command(exe, args...)
	cmd.Stdout, cmd.Stderr = logFile, logFile
	cmd.ExtraFiles = []*os.File{w}
	cmd.SysProcAttr = &syscall.SysProcAttr{Setsid: true}
	err = cmd.Start()
	w.Close()
	if err != nil {
		return fmt.Errorf("start supervisor: %w", err)
	}
	stop := context.AfterFunc(ctx, func() { _ = cmd.Process.Signal(syscall.SIGTERM) })
	defer stop()
	step := printStep(out)
	for lines := bufio.NewScanner(r); lines.Scan(); {
		var m message
		if err := json.Unmarshal(lines.Bytes(), &m); err != nil {
			return fmt.Errorf("read report of the supervisor: %w", err)
		}
		switch {
		case m.Error != "":
			_ = cmd.Wait() // it has already cleaned up
			return errdefs.New(m.Class, "%s", m.Error)
		case m.Ready:
			printReady(out, o.Dir)
			return cmd.Process.Release()
		}
		step(m.Step, m.Took)
	}
	err = cmd.Wait()
	return errdefs.Unavailablef("the supervisor ended before the cluster was ready (%v): %s", err, lastLine(logFile.Name()))
}

// superviseDetached is the background half of runDetached.
func superviseDetached(ctx context.Context, o Options) error {
	ctx, stop := signal.NotifyContext(ctx, syscall.SIGINT, syscall.SIGTERM)
	defer stop()
	syscall.CloseOnExec(reportFD)
	report := os.NewFile(reportFD, "report")
	signal.Ignore(syscall.SIGPIPE) // the parent may have ended
	enc := json.NewEncoder(report)
	log, err := logging.New(os.Stderr, "info", "text")
	if err != nil {
		return err
	}
	step := func(s string, took time.Duration) {
		log.Info("step done", "op", s, "dur", took)
		_ = enc.Encode(message{Step: s, Took: took})
	}
	isReady := false
	err = Run(ctx, o, log, step, func() {
		isReady = true
		_ = enc.Encode(message{Ready: true})
		report.Close()
	})
	if err != nil && !isReady {
		_ = enc.Encode(message{Error: err.Error(), Class: errdefs.ClassOf(err)})
	}
	return err
}

// kubeconfigOf returns the path to show to the user. It is valid from any working folder.
func kubeconfigOf(dir string) string {
	path := layout{dir}.kubeconfig()
	if abs, err := filepath.Abs(path); err == nil {
		return abs
	}
	return path
}
