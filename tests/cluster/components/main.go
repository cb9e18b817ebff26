// All of a Kubernetes cluster that is written in Go, as one static program: the first argument names the component.
package main

import (
	"context"
	"fmt"
	"net"
	"os"
	"path/filepath"

	"github.com/coredns/coredns/coremain"
	"github.com/spf13/cobra"
	"go.etcd.io/etcd/server/v3/etcdmain"
	"k8s.io/client-go/util/cert"
	"k8s.io/component-base/cli"
	apiserver "k8s.io/kubernetes/cmd/kube-apiserver/app"
	controllers "k8s.io/kubernetes/cmd/kube-controller-manager/app"
	proxy "k8s.io/kubernetes/cmd/kube-proxy/app"
	scheduler "k8s.io/kubernetes/cmd/kube-scheduler/app"
	kubelet "k8s.io/kubernetes/cmd/kubelet/app"

	_ "github.com/coredns/coredns/plugin/bind"
	_ "github.com/coredns/coredns/plugin/errors"
	_ "github.com/coredns/coredns/plugin/kubernetes"
	_ "github.com/coredns/coredns/plugin/ready"
	// Metrics and logs whose registration the components leave to their own main functions.
	_ "k8s.io/component-base/logs/json/register"
	_ "k8s.io/component-base/metrics/prometheus/clientgo"
	_ "k8s.io/component-base/metrics/prometheus/version"
)

var components = map[string]func() *cobra.Command{
	"kube-apiserver":          apiserver.NewAPIServerCommand,
	"kube-controller-manager": controllers.NewControllerManagerCommand,
	"kube-scheduler":          func() *cobra.Command { return scheduler.NewSchedulerCommand() },
	"kube-proxy":              proxy.NewProxyCommand,
	"kubelet":                 func() *cobra.Command { return kubelet.NewKubeletCommand(context.Background()) },
}

// certificate writes a new key and a certificate of its own authority for one address to a folder.
func certificate(folder string, address net.IP) error {
	names := []string{"kubernetes", "kubernetes.default", "kubernetes.default.svc", "localhost"}
	chain, key, err := cert.GenerateSelfSignedCertKey("kubernetes", []net.IP{address, net.IPv4(10, 96, 0, 1)}, names)
	if err != nil {
		return err
	}
	if err := os.WriteFile(filepath.Join(folder, "cluster.crt"), chain, 0o644); err != nil {
		return err
	}
	return os.WriteFile(filepath.Join(folder, "cluster.key"), key, 0o600)
}

func main() {
	if len(os.Args) < 2 {
		fmt.Fprintln(os.Stderr, "usage: components COMPONENT [OPTION...]")
		os.Exit(2)
	}
	name := os.Args[1]
	// The components read os.Args themselves.
	os.Args = append([]string{name}, os.Args[2:]...)
	switch name {
	case "certificate":
		if err := certificate(os.Args[1], net.ParseIP(os.Args[2])); err != nil {
			fmt.Fprintln(os.Stderr, err)
			os.Exit(1)
		}
	case "etcd":
		etcdmain.Main(os.Args)
	case "coredns":
		coremain.Run()
	default:
		command, known := components[name]
		if !known {
			fmt.Fprintf(os.Stderr, "components: no component %q\n", name)
			os.Exit(2)
		}
		os.Exit(cli.Run(command()))
	}
}
