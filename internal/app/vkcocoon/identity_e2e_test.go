//go:build e2e

package vkcocoon

import (
	"context"
	"log/slog"
	"os"
	"path/filepath"
	"slices"
	"testing"
	"time"

	authv1 "k8s.io/api/authentication/v1"
	certificates "k8s.io/api/certificates/v1"
	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/tools/clientcmd"

	"cocoonstack.io/cocoon/internal/testkit/kubetest"
)

// A real control plane approves and signs the request of a new node with the rights in bootstrap.yaml. The node's new
// identity may access its own Node and no other; its serving certificate waits for approval.
func TestBootstrapWithTheRealSigner(t *testing.T) {
	cluster := kubetest.Up(t)
	c, err := Config{BootstrapKubeconfig: cluster.Bootstrap(t), CertDir: filepath.Join(t.TempDir(), "pki"), NodeName: "n1", NodeIP: "10.1.2.3"}.complete()
	if err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithTimeout(t.Context(), 4*time.Minute)
	defer cancel()
	stop, err := c.bootstrap(ctx, clientset, slog.New(slog.DiscardHandler))
	if err != nil {
		t.Fatal(err)
	}
	defer stop()
	rc, err := clientcmd.BuildConfigFromFlags("", c.Kubeconfig)
	if err != nil {
		t.Fatal(err)
	}
	node, err := kubernetes.NewForConfig(rc)
	if err != nil {
		t.Fatal(err)
	}
	who, err := node.AuthenticationV1().SelfSubjectReviews().Create(ctx, &authv1.SelfSubjectReview{}, metav1.CreateOptions{})
	if err != nil {
		t.Fatal(err)
	}
	if u := who.Status.UserInfo; u.Username != "system:node:n1" || !slices.Contains(u.Groups, "system:nodes") {
		t.Errorf("the node is %+v", u)
	}
	for name, allowed := range map[string]bool{"n1": true, "n2": false} {
		_, err := node.CoreV1().Nodes().Create(ctx, &corev1.Node{ObjectMeta: metav1.ObjectMeta{Name: name}}, metav1.CreateOptions{})
		if allowed && err != nil || !allowed && !apierrors.IsForbidden(err) {
			t.Errorf("n1 makes the Node %s: %v", name, err)
		}
	}
	served, run, err := c.serving(node)
	if err != nil {
		t.Fatal(err)
	}
	go func() { _ = run(ctx) }()
	request := ""
	for every := time.Tick(50 * time.Millisecond); request == "" && ctx.Err() == nil; <-every {
		list, err := node.CertificatesV1().CertificateSigningRequests().List(ctx, metav1.ListOptions{})
		if err != nil {
			t.Fatal(err)
		}
		for _, r := range list.Items {
			if r.Spec.SignerName == certificates.KubeletServingSignerName {
				request = r.Name
			}
		}
	}
	if _, err := os.Stat(served); err == nil {
		t.Error("the serving certificate is there before anybody approved it")
	}
	cluster.Kubectl(t, "", "certificate", "approve", request)
	for every := time.Tick(50 * time.Millisecond); ctx.Err() == nil; <-every {
		if _, err := os.Stat(served); err == nil {
			break
		}
	}
	if cert := read(t, served); cert.DNSNames[0] != "n1" || cert.IPAddresses[0].String() != "10.1.2.3" {
		t.Errorf("serving certificate for %v, %v", cert.DNSNames, cert.IPAddresses)
	}
}
